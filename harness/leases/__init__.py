"""Leases on devices across processes: where they are kept, who holds them, and whose turn it is.

pytest-xdist hands tests to workers without knowing what a test needs.  So workers take the devices of a test from a
place that they all share: one lock file for each device, in folders of this user's.

- A lease is all of a test's devices or none, so that nobody holds some and waits for more.
- All that wait stand in one queue, so that small worlds don't overtake a large one forever.
- Sessions that wait side by side get equally many devices.
- The kernel drops a lease when the process that holds it ends.
"""

from harness.leases.holding import Leases, Wait
from harness.leases.places import VARIABLE, Places, survey

__all__ = ["VARIABLE", "Leases", "Places", "Wait", "survey"]
