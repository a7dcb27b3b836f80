# in compiled code, register_post_accumulate_grad_hook of a DTensor that is no leaf silently changes gradients
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_post_accumulate.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def function(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_post_accumulate_grad_hook(lambda each: each * 100)
    return (y * 3).sum()


mesh = init_device_mesh("cpu", (size,))
outcomes: list[object] = []
for call in function, torch.compile(function, backend="aot_eager"):
    x = DTensor.from_local(torch.ones(1, 2), mesh, [Shard(0)]).requires_grad_()
    try:
        call(x).backward()
        outcomes.append(x.grad.full_tensor().tolist())
    except RuntimeError as error:
        outcomes.append("refused" if "non-leaf tensors" in str(error) else str(error))
report(*outcomes)
