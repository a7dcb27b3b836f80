# pow or masked_fill of a DTensor with a complex number, and the gradient of angle, raise an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_complex_scalar.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (2,))
whole = torch.tensor([1j, 2j, -1j, -2j])
plain, x = whole.clone().requires_grad_(), distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
torch.angle(plain).sum().backward()
expected = [plain.grad.tolist(), (whole**2j).tolist()]
observed: list[object] = []
try:
    torch.angle(x).sum().backward()
    observed.append(x.grad.full_tensor().tolist())
    observed.append((x.detach() ** 2j).full_tensor().tolist())
except (RuntimeError, TypeError) as error:
    observed.append(str(error).splitlines()[0])
report(expected, observed)
