"""A process that takes leases on devices, for test_devices.py: ``lease_holder.py DIRECTORY DEVICES MODE ...``.

``hold N``: takes N devices, prints their names, and keeps them until its standard input ends.
``churn N,N,...``: takes and gives back so many, one after another; notes every device that was someone else's.
``stream N``: takes and gives back N again and again, until its standard input ends.
"""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

from harness.devices import Inventory, Leases


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
    if mode == "hold":
        with leases.hold(int(argument)) as devices:
            print(*devices, flush=True)
            sys.stdin.read()
    elif mode == "churn":
        for count in argument.split(","):
            with leases.hold(int(count)) as devices:
                use(directory, devices)
    elif mode == "stream":
        print("streaming", flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            with leases.hold(int(argument)) as devices:
                use(directory, devices)


if __name__ == "__main__":
    main()
