"""Leases on devices across processes: where they are kept, who holds them, and whose turn it is.

pytest-xdist hands tests to workers without knowing what a test needs, so workers take the devices of a test from a
place that they all share: one lock file for each device, in folders of this user's.  A lease is all of a test's devices
or none (nobody holds some and waits for more), whoever waits stands in one queue (so a large world is not overtaken for
ever by small ones), sessions that wait side by side get as many devices each, and the kernel drops a lease with the
process that held it.
"""

from harness.leases.holding import Leases, Wait
from harness.leases.places import VARIABLE, Places, survey

__all__ = ["VARIABLE", "Leases", "Places", "Wait", "survey"]
