"""Forks, ends and reaps a process that has imported what ranks need.

Run as a program: ``forked.py MODULES [huge]``; for each line that it reads, it forks twenty times and says how many
seconds of the processor a fork and its end took in the kernel.
"""

from __future__ import annotations

import gc
import os
import resource
import sys

from harness.worlds import pages

FORKS = 20


def in_kernel() -> float:
    return sum(resource.getrusage(who).ru_stime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def main() -> None:
    for module in sys.argv[1].split(","):
        try:
            __import__(module)
        except ImportError:
            pass
    gc.collect()
    gc.freeze()
    if "huge" in sys.argv:
        pages.collapse()
    print("ready", flush=True)
    for _ in sys.stdin:
        before = in_kernel()
        for _ in range(FORKS):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
        print((in_kernel() - before) / FORKS, flush=True)


main()
