# A checkpoint that several threads write is silently saved without the data of a thread that fails
# https://github.com/pytorch/pytorch/issues/191391
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_thread_error.py
# It exits with 1 where the defect is there.

import sys
import tempfile
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint


class Failing(checkpoint.DefaultSavePlanner):
    """Fails in every thread but the one that saves, which waits for that."""

    failed = threading.Event()

    def resolve_data(self, write_item):
        if threading.current_thread() is not threading.main_thread():
            self.failed.set()
            raise OSError("no space left on device")
        self.failed.wait(5)
        return super().resolve_data(write_item)


threading.excepthook = lambda _: None
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
state = {str(number): torch.ones(2) for number in range(8)}
writer = checkpoint.FileSystemWriter(folder[0], thread_count=2)
try:
    checkpoint.save(state, storage_writer=writer, planner=Failing())
    observed = "saved"
except checkpoint.CheckpointException:
    observed = "an error"
print(f"rank {dist.get_rank()}: expected an error, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "an error")
