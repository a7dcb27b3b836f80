# a mesh that comes from another process by pickle is equal to one there, but its hash silently differs
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 mesh_hash_pickled.py
# It exits with 1 where the defect is there.

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

SEED = str(1 + int(os.environ["RANK"]))
if os.environ.get("PYTHONHASHSEED") != SEED:  # hashes of texts differ between processes, unless all have one seed
    os.environ["PYTHONHASHSEED"] = SEED
    os.execv(sys.executable, [sys.executable, *sys.argv])  # noqa: S606

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
known = {mesh: "a value"}
box = [mesh]
dist.broadcast_object_list(box)  # as a checkpoint of DTensors that torch.save wrote has it
expected, observed = (True, "a value"), (box[0] == mesh, known.get(box[0]))
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
bad = torch.tensor([float(observed != expected)])
dist.all_reduce(bad)
del known, box, mesh
dist.destroy_process_group()
sys.exit(bool(bad))
