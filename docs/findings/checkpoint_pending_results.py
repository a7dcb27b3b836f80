# async_save silently saves memory that nobody wrote in place of a functional collective's result
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_pending_results.py
# It exits with 1 where the defect is there.

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
COUNT = 100_000
state = {
    "result": functional.all_reduce(torch.ones(COUNT), "sum", mesh),
    "in a DTensor": distribute_tensor(torch.full((COUNT,), 2.0), mesh, [Shard(0)]).redistribute(
        mesh, [Replicate()], async_op=True
    ),
}
checkpoint.async_save(state, checkpoint_id=folder[0]).result()
loaded = {name: torch.zeros(COUNT) for name in state}
checkpoint.load(loaded, checkpoint_id=folder[0])
expected = {"result": [float(size)], "in a DTensor": [2.0]}
observed = {name: tensor.unique().tolist()[:3] for name, tensor in loaded.items()}
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
