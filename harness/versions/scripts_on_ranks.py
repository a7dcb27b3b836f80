"""Runs scripts that need ranks, as ``torchrun`` would, many of them from one process that has imported torch.

It is run by the Python of another environment, which need not have Concord: it imports torch and the standard library.
Each line of standard input is a request, and each line of standard output the answer to one:

- ``{"script": path, "ranks": n, "seconds": limit, "fresh": whether by a Python of its own}``
- ``{"statuses": [exit code of each rank; minus the signal that killed it; null: killed at the limit], "outputs":
  [what each rank printed, its end]}``

The first line of standard output is ``{"torch": version, "python": version}``.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NoReturn

_MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed._composable.replicate",
)
"""Imported once: what most scripts import.  Nothing of it may start a thread."""
_LONGEST = 20_000  # characters of a rank's output


def serve() -> None:
    """Answer requests until standard input ends."""
    import torch

    for name in _MODULES:
        importlib.import_module(name)
    _say({"torch": torch.__version__, "python": platform.python_version()})
    for line in sys.stdin:
        request = json.loads(line)
        _say(_run(request["script"], request["ranks"], request["seconds"], fresh=request["fresh"]))


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


def _run(script: str, ranks: int, seconds: float, *, fresh: bool) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        store, port = _fork_store()
        pids = [_fork(script, rank, ranks, port, folder, fresh=fresh) for rank in range(ranks)]
        statuses = _ends(pids, time.monotonic() + seconds)
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
        outputs = [Path(folder, str(rank)).read_text(errors="replace")[-_LONGEST:] for rank in range(ranks)]
    return {"statuses": [statuses[pid] for pid in pids], "outputs": outputs}


def _ends(pids: list[int], deadline: float) -> dict[int, int | None]:
    """Wait for processes; returns their exit codes.  Those that are left at the deadline are killed."""
    statuses: dict[int, int | None] = {}
    while left := set(pids) - set(statuses):
        for pid in left:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                statuses[pid] = None
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        time.sleep(0.02)
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)  # what a rank has left behind
        except ProcessLookupError:
            continue
    return statuses


def _fork(script: str, rank: int, ranks: int, port: int, folder: str, *, fresh: bool) -> int:
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        _become(script, rank, ranks, port, folder, fresh=fresh)
    return pid


def _become(script: str, rank: int, ranks: int, port: int, folder: str, *, fresh: bool) -> NoReturn:
    """Run a script as torchrun would on a rank, and leave without the interpreter's own end, which takes long."""
    with open(os.devnull, "rb") as null, open(Path(folder, str(rank)), "wb") as out:
        for source, target in ((null, 0), (out, 1), (out, 2)):
            os.dup2(source.fileno(), target)
    of_torchrun = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    os.environ.update({name: str(value) for name, value in of_torchrun.items()})
    if fresh:
        os.execv(sys.executable, [sys.executable, script])  # noqa: S606 - as torchrun starts it
    sys.argv, sys.path[0] = [script], str(Path(script).parent)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fork_store() -> tuple[int, int]:
    """Fork a process that has the store through which ranks meet, as torchrun has it; returns its pid and its port."""
    ready, told = os.pipe()
    pid = os.fork()
    if not pid:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        os.setpgid(0, 0)
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.write(told, str(store.port).encode())
        signal.pause()
        os._exit(0)
    os.close(told)
    port = os.read(ready, 16)
    os.close(ready)
    return pid, int(port)


if __name__ == "__main__":
    serve()
