# batch_isend_irecv raises in a group that is written in Python, although send and recv work
# unreported
# Seen with torch 2.15.0+cu132, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 python_group_batch.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist


class Done(dist.Work):
    """A work that is done at once."""

    def wait(self, timeout: object = None) -> bool:
        return True


class Mine(dist.ProcessGroup):
    """A group that moves nothing, and keeps what it is called for."""

    def __init__(self, index: int, size: int) -> None:
        super().__init__(index, size)
        self.calls: list[str] = []

    def getBackendName(self) -> str:  # noqa: N802 - torch asks by this name
        return "mine"

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self.called = name

    def getGroupName(self) -> str:  # noqa: N802
        return self.called

    def send(self, *arguments: object, **named: object) -> Done:
        self.calls.append("send")
        return Done()

    def recv(self, *arguments: object, **named: object) -> Done:
        self.calls.append("recv")
        return Done()


made: list[Mine] = []


def make(store: dist.Store, index: int, size: int, timeout: object) -> Mine:
    """Make the group of this process."""
    made.append(Mine(index, size))
    return made[-1]


dist.Backend.register_backend("mine", make, devices=["cpu"])
dist.init_process_group("mine")
peer = 1 - dist.get_rank()
dist.send(torch.ones(2), peer)
dist.recv(torch.ones(2), peer)
expected = ["send", "recv", "send", "recv"]
observed: object
try:
    dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(2), peer), dist.P2POp(dist.irecv, torch.ones(2), peer)])
    observed = made[0].calls
except RuntimeError as e:
    observed = f"RuntimeError: {str(e).splitlines()[0]}"
print(f"rank {1 - peer}: expected {expected}, observed {observed}")
sys.exit(observed != expected)
