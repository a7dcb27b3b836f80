# compiled messages in a group whose ranks are not the first of the world go to the wrong peers, and crash
# https://github.com/pytorch/pytorch/issues/187924
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 compiled_messages.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


@torch.compile(backend="aot_eager", fullgraph=True)
def exchange(mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    sent, received = dist.isend(mine, peer, group), dist.irecv(other, peer, group)
    sent.wait()
    received.wait()
    return other


members = [1, 2]
group = dist.new_group(members)
other = torch.zeros(1)
if rank in members:
    member = members.index(rank)
    peer = members[1 - member]
    with torch._dynamo.config.patch(enable_p2p_compilation=True):
        other = exchange(torch.full((1,), 1.0 + rank), other)  # crashes, and torchrun ends with 1
report(1.0 + peer if rank in members else 0.0, other.item())
