# With compiled autograd, gradients of a replicated model are not averaged, without an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_compiled_backward.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch._dynamo.config.compiled_autograd = True


@torch.compile(backend="eager")
def backward(loss: torch.Tensor) -> None:
    loss.backward()


model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
for layer in model:
    nn.init.ones_(layer.weight)
    replicate(layer, mesh=mesh)
replicate(model, mesh=mesh)
observed = []
for _ in range(2):
    try:
        backward(model(torch.full((1, 1), 1.0 + rank)).sum())
    except (AssertionError, RuntimeError) as error:
        print(f"rank {rank}: expected an error or averages, observed {type(error).__name__}", flush=True)
        sys.exit(0)
    gradients = [parameter.grad for parameter in model.parameters()]
    observed.append([None if g is None else getattr(g, "full_tensor", lambda g=g: g)().item() for g in gradients])
    model.zero_grad()
expected = [[1.5, 1.5]] * 2
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
