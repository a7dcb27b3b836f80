# a pipeline schedule with a loss function can't evaluate without targets, which eval has as optional: TypeError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_evaluated_without_targets.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

stage = PipelineStage(nn.Identity(), rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)
x = torch.arange(4.0)[:, None]
expected = [0.0, 1.0, 2.0, 3.0] if rank else None
observed: object
try:
    with torch.no_grad():
        output = schedule.eval(*(() if rank else (x,)))
    observed = None if output is None else output.flatten().tolist()
except TypeError as error:
    observed = f"TypeError: {error}"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
bad = torch.tensor([float(observed != expected)])
dist.all_reduce(bad)
dist.destroy_process_group()
sys.exit(bool(bad))
