# A slice of a DTensor that does not begin with its first element can't be copied, saved by torch.save or by async_save
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_sliced_copies.py
# It exits with 1 where the defect is there.

import copy
import io
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
table = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Replicate()])


def told(copied: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> str:
    """Say whether a tensor can be copied."""
    try:
        copied(tensor)
    except RuntimeError as error:
        return str(error)
    return "copied"


ways: dict[str, Callable[[torch.Tensor], object]] = {
    "copy.deepcopy": copy.deepcopy,
    "torch.save": lambda tensor: torch.save(tensor, io.BytesIO()),
    "a stager": lambda tensor: BlockingAsyncStager().stage({"tensor": tensor}),
}
expected = {name: told(way, table[:2]) for name, way in ways.items()}
observed = {name: told(way, table[2:]) for name, way in ways.items()}
print(
    f"rank {dist.get_rank()}: expected as of the first rows: {expected}, observed of the last: {observed}", flush=True
)
dist.destroy_process_group()
sys.exit(observed != expected)
