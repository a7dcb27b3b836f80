# convert_sync_batchnorm silently converts a batch norm that a module has under two names under the first one only
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 batch_norm_shared.py
# It exits with 1 where the defect is there.

import sys

import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
norm = nn.BatchNorm1d(2)
model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(norm, nn.ReLU(), norm))
observed = [type(model[i]).__name__ for i in (0, 2)]
print(f"rank {dist.get_rank()}: expected SyncBatchNorm twice, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != ["SyncBatchNorm"] * 2)
