"""A process that takes leases on devices, for test_leases.py.

``lease_holder.py DIRECTORY DEVICES MODE ARGUMENT [SESSION]``; modes are:

``hold N``: takes N devices, prints their names, and keeps them until its standard input ends.
``churn N,N,...``: takes and gives back so many, one after another; notes every device that was someone else's.
``until FILE``: takes all cores of the host, prints their names, and keeps them until there is such a file.
``fork N``: takes N devices, forks a child that sleeps, prints its pid, and keeps them.
``stream N``: takes and gives back N again and again, until its standard input ends.
``share N``: takes one of N shares of a device, prints its name, and keeps it until its standard input ends.
``stream-shares N``: takes and gives back one of four shares of N devices, again and again.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

from harness.devices import Inventory, host_inventory
from harness.leases import Leases
from harness.leases.records import introduce


def sim(count: int) -> Inventory:
    """Devices that do not exist."""
    return Inventory("sim", tuple(f"sim:{i}" for i in range(count)), tuple(f"sim-{i}" for i in range(count)))


def use(directory: Path, devices: tuple[str, ...]) -> None:
    """Use devices that nobody else may use at the same time: making a file that is there already fails."""
    flags = [directory / f"in-use-{device}" for device in devices]
    for flag in flags:
        try:
            os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            (directory / "over-subscribed").write_text(f"{flag.name} by {devices}")
    os.sched_yield()
    for flag in flags:
        flag.unlink(missing_ok=True)


def main() -> None:
    directory = Path(sys.argv[1])
    leases = Leases(sim(int(sys.argv[2])), directory)
    mode, argument = sys.argv[3], sys.argv[4]
    if sys.argv[5:] and sys.argv[5]:
        introduce(sys.argv[5], Path(sys.argv[0]).name, os.getcwd())
    if mode == "hold":
        with leases.hold(int(argument), what="a test") as devices:
            print(*devices, flush=True)
            sys.stdin.read()
    elif mode == "until":
        with Leases(host_inventory(), directory).hold(len(host_inventory().devices), what="a test") as devices:
            print(*devices, flush=True)
            while not Path(argument).exists():
                time.sleep(0.01)
    elif mode == "fork":
        with leases.hold(int(argument)):
            child = os.fork()
            if child:
                print(child, flush=True)
            signal.pause()
    elif mode == "churn":
        for count in argument.split(","):
            with leases.hold(int(count)) as devices:
                use(directory, devices)
    elif mode == "share":
        with leases.hold(1, what="a test", shares=int(argument)) as devices:
            print(*devices, flush=True)
            sys.stdin.read()
    elif mode == "stream-shares":
        print("streaming", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            with leases.hold(int(argument), shares=4):
                time.sleep(0.001)
    elif mode == "stream":
        print("streaming", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            with leases.hold(int(argument)) as devices:
                use(directory, devices)


if __name__ == "__main__":
    main()
