# BroadcastingTorchSaveReader ignores process_group: a load by some of the ranks hangs
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 torch_save_reader_group.py
# It exits with 1 where the defect is there.

import os
import tempfile
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner

weight = torch.arange(6.0).view(2, 3)
expected = weight.tolist()


def report(observed: object) -> None:
    """Say what came, and leave at once: other ranks may still wait."""
    print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
    os._exit(observed != expected)


dist.init_process_group("gloo", timeout=timedelta(seconds=5))
threading.Timer(15, report, ["a hang"]).start()
file = [tempfile.mkstemp()[1]]
dist.broadcast_object_list(file)
if dist.get_rank() == 0:
    torch.save({"weight": weight}, file[0])
dist.barrier()
state, group = {"weight": torch.zeros(2, 3)}, dist.new_group([0])
if dist.get_rank() == 1:  # which does not load
    report(expected)
try:
    reader, planner = BroadcastingTorchSaveReader(), DynamicMetaLoadPlanner()
    checkpoint.load(state, storage_reader=reader, planner=planner, checkpoint_id=file[0], process_group=group)
    report(state["weight"].float().tolist())
except Exception as e:
    report(f"{type(e).__name__}: {str(e)[-80:]}")
