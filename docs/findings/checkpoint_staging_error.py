# If staging fails at once, staging_completion of async_save says that it was done
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_staging_error.py
# It exits with 1 where the defect is there.

import sys
import tempfile
from concurrent.futures import Future

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.staging import AsyncStager


class Failing(AsyncStager):
    """Has failed when it returns."""

    def stage(self, state_dict):
        future = Future()
        future.set_exception(MemoryError("no memory on the host"))
        return future


dist.init_process_group("gloo")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
saved = checkpoint.async_save({"weight": torch.ones(2)}, checkpoint_id=folder[0], async_stager=Failing())
try:
    saved.staging_completion.result(10)
    observed = "done"
except MemoryError:
    observed = "MemoryError"
print(f"rank {dist.get_rank()}: expected MemoryError, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "MemoryError")
