# BroadcastingTorchSaveReader hangs if it is to load a file of torch.save into DTensors, as the weights under FSDP2
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_torch_save_reader.py
# It exits with 1 where the defect is there.

import os
import tempfile
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from torch.distributed.fsdp import fully_shard

expected = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


def report(observed: object) -> None:
    """Say what came, and leave at once: other ranks may still wait."""
    print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
    os._exit(observed != expected)


dist.init_process_group("gloo", timeout=timedelta(seconds=5))
threading.Timer(15, report, ["a hang"]).start()
file = [tempfile.mkstemp()[1]]
dist.broadcast_object_list(file)
model = torch.nn.Linear(2, 4, bias=False)
if dist.get_rank() == 0:
    torch.save({"weight": torch.arange(8.0).view(4, 2)}, file[0])
dist.barrier()
fully_shard(model)
state = model.state_dict()
try:
    reader, planner = BroadcastingTorchSaveReader(), DynamicMetaLoadPlanner()
    checkpoint.load(state, storage_reader=reader, planner=planner, checkpoint_id=file[0])
    report(state["weight"].full_tensor().tolist())
except Exception as e:
    report(f"{type(e).__name__}: {str(e)[-80:]}")
