# Loading a checkpoint leaves a number under an integer key as it was, and adds it under a text
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_integer_keys.py
# It exits with 1 where the defect is there.

import sys
import tempfile

import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

dist.init_process_group("gloo")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
expected = {"steps": {0: 5, 1: 7}}
checkpoint.save(expected, checkpoint_id=folder[0])
observed = {"steps": {0: 0, 1: 0}}
checkpoint.load(observed, checkpoint_id=folder[0])
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
