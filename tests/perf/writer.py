"""A process that writes to a history: ``writer.py PLACE store NAME COUNT`` or ``writer.py PLACE stop NAME``.

``store`` stores COUNT nights of its own and one that every writer stores; ``stop`` says so in the midst of a
transaction, when a night is half there, and stays so until it is killed.
"""

from __future__ import annotations

import sys
from typing import Any

from sqlalchemy import event

from harness.bench.history.store import History
from tests.perf.nights import night


def main(place: str, what: str, name: str, *rest: str) -> None:
    with History(place) as history:
        if what == "store":
            for number in range(int(rest[0])):
                history.add(night(f"{name}-{number}", started=1.0 + number))
                history.add(night("shared", started=0.5))
            return

        def stop(*arguments: Any) -> None:
            if "INSERT INTO perf_measurements" in str(arguments[2]):
                print("in the midst", flush=True)
                sys.stdin.read()

        event.listen(history._engine, "after_cursor_execute", stop)
        history.add(night(name, started=9.0))


main(*sys.argv[1:])
