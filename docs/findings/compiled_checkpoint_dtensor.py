# Compiled code with dropout of a DTensor in a checkpoint is an AssertionError about saved tensors in the forward
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_checkpoint_dtensor.py
# It exits with 1 where the defect is there. With backend="inductor", it is there since 2.14, or with fallback_random.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def gradient(run: object) -> list[float]:
    mesh = init_device_mesh("cpu", (size,))
    x = distribute_tensor(torch.ones(4 * size), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    torch.manual_seed(7)
    run(x).sum().backward()  # type: ignore[operator]
    return x.grad.to_local().tolist()  # type: ignore[union-attr]


def dropped(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: dropout(y, 0.5), x, use_reentrant=False)


try:
    observed: object = gradient(torch.compile(dropped, backend="aot_eager", fullgraph=True))
except AssertionError as error:
    observed = str(error)
report(gradient(dropped), observed)
