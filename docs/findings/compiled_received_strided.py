# Compiled by Inductor, irecv into a transposed tensor silently leaves it as it was, which is refused uncompiled
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_received_strided.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def step(x: torch.Tensor) -> torch.Tensor:
    dist.irecv(x, 0).wait()  # type: ignore[union-attr]
    return x * 2


if not hasattr(torch._dynamo.config, "enable_p2p_compilation"):
    report("only since 2.12", "only since 2.12")
expected = observed = "twice the message"
if rank == 0:
    dist.send(torch.ones(512, 256), 1)
elif rank == 1:
    transposed = torch.zeros(256, 512).t()  # uncompiled, gloo says that it has to be contiguous
    try:
        with torch._dynamo.config.patch(enable_p2p_compilation=True):
            result = torch.compile(step, fullgraph=True)(transposed)
    except RuntimeError:
        dist.recv(torch.empty(512, 256), 0)
    else:
        observed = expected if bool((result == 2).all()) else f"numbers from {result.min()} to {result.max()}"
report(expected, observed)
