# With an activation_memory_budget of 0 the backward launches collectives of the forward once more, and ranks with
# different budgets hang (https://github.com/pytorch/pytorch/pull/147561 forbids it; a budget of 0 returns before that)
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_budget.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
counts = []


def parted(joint, inputs, **options):
    """Count the collectives of the backward."""
    forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
    counts.append(sum("all_reduce" in str(node.target) for node in backward.graph.nodes))
    return forward, backward


def through(x: torch.Tensor) -> torch.Tensor:
    summed = functional.all_reduce(x.sin(), "sum", dist.group.WORLD)
    return (summed.cos() * summed).sum()


backend = aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, partition_fn=parted)
with torch._functorch.config.patch(activation_memory_budget=float(rank)):
    torch.compile(through, backend=backend)(torch.ones(8, 8, requires_grad=True))
print(f"rank {rank}: expected [1] all_reduce in the backward, observed {counts}", flush=True)
bad = torch.tensor([float(counts != [1])])
dist.all_reduce(bad)
dist.destroy_process_group()
sys.exit(1 if bad.item() else 0)
