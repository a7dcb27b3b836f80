# With reduce_dtype, FSDP2 silently takes the real part of complex gradients (before 2.15, TypeError)
# unreported
# Seen with torch 2.15.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_complex_reduce_dtype.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 1 + 2j))

    def forward(self, x):
        return (self.weight * x).abs().square().sum()


model = Model()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
try:
    model(torch.ones(2)).backward()
    observed = model.weight.grad.full_tensor().tolist()
except TypeError as error:
    observed = repr(error)
expected = [2 + 4j] * 2
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
