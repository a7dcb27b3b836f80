# A slice of a mesh keeps its process groups alive after DTensor's caches have been cleared
# unreported
# Seen with torch 2.11.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_mesh_kept.py
# It exits with 1 where the defect is there.
#
# replicate() on FSDP2's machinery makes each parameter a DTensor, whose arguments of an operator refer to the mesh. If
# the operator is registered without static_kwargkey, python_variable.cpp (create_native_op_schema) counts a reference
# too many to the tuple of these arguments, which is then never freed, whatever _clear_sharding_prop_cache() clears.

import gc
import sys
import weakref
from datetime import timedelta

import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["a"]
model = replicate(nn.Linear(2, 2), mesh=mesh)
kept = weakref.ref(mesh)
del mesh, model
_clear_sharding_prop_cache()
gc.collect()
observed = "freed" if kept() is None else "still there"
print(f"rank {rank}: expected freed, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == "freed" else 1)
