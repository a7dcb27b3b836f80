# Compiled code never frees a tensor that it has sent by isend or batch_isend_irecv, although it waits for it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_sent_kept.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _get_work_registry_size

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
    if rank == 0:
        dist.isend(x, 1).wait()  # type: ignore[union-attr]
    elif rank == 1:
        dist.irecv(x, 0).wait()  # type: ignore[union-attr]
    return x + 1


if not hasattr(torch._dynamo.config, "enable_p2p_compilation"):
    report("only since 2.12", "only since 2.12")
with torch._dynamo.config.patch(enable_p2p_compilation=True):
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(10):
        compiled(torch.ones(1024))
# each pending operation keeps its tensor; when the process ends, PyTorch warns that they were not waited for
report(0, _get_work_registry_size())
