# A module's forward pre-hooks from before composable checkpoint run twice on what it recomputes: wrong gradients
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_other_hooks.py
# It exits with 1 where the defect is there. With early_stop=False, a forward hook that saves a tensor is an error.
# torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False) takes both kinds of hooks.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import checkpoint

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def gradient(hook: str, **options: bool) -> object:
    """Return the gradient of the weight."""
    layer = nn.Linear(2, 1, bias=False)
    if hook == "pre-hook":
        layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    else:
        layer.register_forward_hook(lambda module, args, output: output * output.detach())
    nn.init.ones_(layer.weight)
    checkpoint(layer, **options)
    try:
        layer(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return layer.weight.grad.tolist()


report([[[2.0, 2.0]], [[2.0, 2.0]]], [gradient("pre-hook"), gradient("hook", early_stop=False)])
