# An operator on a DTensor communicates on the groups of an equal mesh that was used before
# https://github.com/huggingface/transformers/pull/48383
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=4 dtensor_equal_meshes.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


# DeviceMesh.__eq__ and __hash__ compare ranks and names, and not groups. DTensor caches what an operator gives by the
# specs of its inputs, so the second result refers to the first mesh. If the first mesh's groups have been destroyed,
# the next collective raises "Could not resolve the process group registered under the name ..."
own, used = [], []
for _ in range(2):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    result = DTensor.from_local(torch.ones(2), mesh, [Replicate(), Shard(0)]).sum()
    own.append(mesh.get_group("tp").group_name)
    used.append(result.device_mesh.get_group("tp").group_name)
report(own, used)
