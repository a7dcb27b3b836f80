# A partial load silently sets what the checkpoint lacks to None if it is no tensor, number, text or container
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_partial_load.py
# It exits with 1 where the defect is there.

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

dist.init_process_group("gloo")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=folder[0])
expected = {"dtype": torch.float16, "phase": 1j, "seen": {1, 2}}
observed = {"weight": torch.zeros(2), **expected}
checkpoint.load(observed, checkpoint_id=folder[0], planner=checkpoint.DefaultLoadPlanner(allow_partial_load=True))
del observed["weight"]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
