# Compiled multilabel_margin_loss is silently wrong if a sample has fewer labels than classes
# https://github.com/pytorch/pytorch/issues/141017
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_multilabel_margin.py
# It exits with 1 where the defect is there. Places after the first -1 count as if they were label 0.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn import functional

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def outcome(function) -> tuple[float, list[float]]:
    """Return the loss of a sample with the labels 3 and 0 of four classes, and its gradient."""
    x = torch.tensor([0.5, 1.0, -1.0, 2.0], requires_grad=True)
    loss = function(x, torch.tensor([3, 0, -1, 1]))
    loss.backward()
    return loss.item(), x.grad.tolist()


loss = functional.multilabel_margin_loss
report(outcome(loss), outcome(torch.compile(loss, backend="aot_eager")))
