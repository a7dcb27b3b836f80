# With cached plans, a checkpoint silently has the dtypes and the nesting of the state that was saved first
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_cached_plans.py
# It exits with 1 where the defect is there.

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

dist.init_process_group("gloo")
folders = [tempfile.mkdtemp(), tempfile.mkdtemp()]
dist.broadcast_object_list(folders)
number = 2**40 + 1
for folder, value in zip(folders, (torch.zeros(1), torch.tensor([number])), strict=True):
    planner = checkpoint.DefaultSavePlanner(enable_plan_caching=True)
    checkpoint.save({"tokens": value}, checkpoint_id=folder, planner=planner)
with tempfile.NamedTemporaryFile() as file:
    dcp_to_torch_save(folders[1], file.name)
    observed = int(torch.load(file.name)["tokens"].item())
print(f"rank {dist.get_rank()}: expected {number}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != number)
