# The state of a new SparseAdam or LBFGS can be neither got by get_optimizer_state_dict nor set: it takes a step
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 state_dict_of_optimizers.py
# It exits with 1 where the defect is there. Afterwards, the learning rate is 0 and gradients are left.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()


def made(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model, whose gradients are sparse for SparseAdam, and its optimizer."""
    model = DistributedDataParallel(nn.Embedding(4, 2, sparse=name == "SparseAdam"))
    return model, getattr(torch.optim, name)(model.parameters(), lr=0.5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take a step, whose gradients are the same on all ranks."""

    def loss() -> torch.Tensor:
        model.zero_grad()
        result = model(torch.tensor([1, 2])).square().sum()
        result.backward()
        return result

    optimizer.step(loss)
    optimizer.zero_grad()


expected, observed = {}, {}
for name in "Adam", "SparseAdam", "LBFGS":
    trained, optimizer = made(name)
    train(trained, optimizer)
    state = get_optimizer_state_dict(trained, optimizer)
    for what in "got", "set":
        model, new = made(name)
        try:
            if what == "got":
                get_optimizer_state_dict(model, new)
            else:
                set_optimizer_state_dict(model, new, state)
            result = "right"
        except (RuntimeError, TypeError) as e:
            result = f"{type(e).__name__}, and the learning rate is {new.param_groups[0]['lr']}"
        expected[f"{name} {what}"], observed[f"{name} {what}"] = "right", result
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
