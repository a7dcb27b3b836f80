# Compiled by Inductor, irecv into zeros or ones that the code makes silently is lost: it computes with the constants
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_received_constant.py
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
    received = torch.zeros_like(x)
    dist.irecv(received, 0).wait()  # type: ignore[union-attr]
    return received * 2


if not hasattr(torch._dynamo.config, "enable_p2p_compilation"):
    report("only since 2.12", "only since 2.12")
result = torch.ones(2)
if rank == 0:
    dist.send(torch.full((2,), 5.0), 1)
elif rank == 1:
    # the result is the same with generated code, whose compiler takes longer than these operators of PyTorch
    inductor = torch._inductor.config.patch(fallback_by_default=True)
    with torch._dynamo.config.patch(enable_p2p_compilation=True), inductor:
        result = torch.compile(step, fullgraph=True)(torch.ones(2))
report([10.0, 10.0] if rank == 1 else [1.0, 1.0], result.tolist())
