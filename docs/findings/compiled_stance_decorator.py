# set_stance as a decorator ignores skip_guard_eval_unsafe, which it obeys as a context
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_stance_decorator.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


graphs = []


def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    graphs.append(graph)
    return graph


def step(x: torch.Tensor, number: int) -> torch.Tensor:
    dist.all_reduce(x)
    return x + number


compiled = torch.compile(step, backend=backend, dynamic=False)
compiled(torch.ones(2), 1)
count = len(graphs)
torch.compiler.set_stance(skip_guard_eval_unsafe=True)(compiled)(torch.ones(2), 2)
report(count, len(graphs))
