# Pipeline schedules of a V shape can't evaluate: they hand over gradients that there are not
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 pipeline_v_evaluation.py
# It exits with 1 where the defect is there.

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
mine = (rank, 3 - rank)
stages = [PipelineStage(nn.Linear(2, 2), i, 4, torch.device("cpu")) for i in mine]
schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
data = torch.ones(8, 2)
observed = "an evaluation"
try:
    with torch.no_grad():
        schedule.eval(*((data,) if rank == 0 else ()), target=data if rank == 0 else None)
except Exception as error:
    observed = f"{type(error).__name__}: {str(error)[:100]}"
print(f"rank {rank}: expected an evaluation, observed {observed}", flush=True)
os._exit(observed != "an evaluation")
