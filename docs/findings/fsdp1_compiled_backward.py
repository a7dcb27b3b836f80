# With compiled autograd, gradients of a model under FSDP1 add up over steps, or are lost, without an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp1_compiled_backward.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
torch._dynamo.config.compiled_autograd = True


@torch.compile(backend="eager")
def backward(loss: torch.Tensor) -> None:
    loss.backward()


observed = []
for original in (True, False):
    model = FullyShardedDataParallel(
        nn.Linear(2, 2, bias=False), device_id=torch.device("cpu"), use_orig_params=original
    )
    for _ in range(2):
        try:
            backward(model(torch.full((1, 2), 1.0 + rank)).sum())
        except (AssertionError, RuntimeError) as error:
            print(f"rank {rank}: expected an error or averages, observed {type(error).__name__}", flush=True)
            sys.exit(0)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.numel()]
        observed.append([None if g is None else g.flatten().tolist() for g in gradients])
        for parameter in model.parameters():
            parameter.grad = None
expected = [[[1.5, 1.5]]] * 4
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
