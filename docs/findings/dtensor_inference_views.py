# In inference mode, a view of a DTensor that was made before, such as a row, t() or detach(), raises an error
# https://github.com/pytorch/pytorch/issues/170419
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_inference_views.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size,))
x = distribute_tensor(torch.eye(2), mesh, [Replicate()])
observed = {}
with torch.inference_mode():
    for name, view in {"t": lambda: x.t(), "row": lambda: x[1], "detach": lambda: x.detach()}.items():
        try:
            observed[name] = view().to_local().tolist()
        except RuntimeError as error:
            observed[name] = str(error)
report({"t": [[1.0, 0.0], [0.0, 1.0]], "row": [0.0, 1.0], "detach": [[1.0, 0.0], [0.0, 1.0]]}, observed)
