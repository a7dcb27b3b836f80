# Saving a checkpoint hangs on other ranks if one fails with an exception that pickle can't load again, as an HTTPError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_error_of_a_rank.py
# It exits with 1 where the defect is there.

import os
import tempfile
import threading
import urllib.error
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint


class Failing(checkpoint.DefaultSavePlanner):
    """Fails on rank 1."""

    def resolve_data(self, write_item):
        if dist.get_rank() == 1:
            raise urllib.error.HTTPError("https://storage", 503, "busy", {}, None)
        return super().resolve_data(write_item)


def report(observed: str) -> None:
    """Say what came, and leave at once: other ranks may still wait."""
    print(f"rank {dist.get_rank()}: expected CheckpointException, observed {observed}", flush=True)
    os._exit(observed != "CheckpointException")


dist.init_process_group("gloo", timeout=timedelta(seconds=5))
threading.Timer(15, report, ["a hang"]).start()
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
try:
    checkpoint.save({str(i): torch.ones(2) for i in range(4)}, checkpoint_id=folder[0], planner=Failing())
    report("saved")
except Exception as e:
    report(type(e).__name__)
