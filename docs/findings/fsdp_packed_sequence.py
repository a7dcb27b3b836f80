# With a param_dtype, FSDP1 does not cast a packed sequence, so that an RNN's forward raises
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_packed_sequence.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


low = MixedPrecision(param_dtype=torch.bfloat16)
model = FullyShardedDataParallel(nn.RNN(2, 2), mixed_precision=low, device_id=torch.device("cpu"))
try:
    found = str(model(nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)]))[0].data.dtype)
except (RuntimeError, ValueError) as error:
    found = str(error)
report("torch.bfloat16", found)
