# torch.compile of no_grad()(module), or of a partial or torch.mul there, is an AssertionError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_decorated_modules.py
# It exits with 1 where the defect is there.

import functools
import sys
from collections.abc import Callable
from datetime import timedelta

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


layer = torch.nn.Linear(2, 2)
steps: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "function": lambda x: torch.no_grad()(lambda given: layer(given))(x),
    "module": lambda x: torch.no_grad()(layer)(x),
    "partial": lambda x: torch.no_grad()(functools.partial(layer))(x),
    "builtin": lambda x: torch.no_grad()(torch.mul)(x, layer.bias),
}


def told(call: Callable[..., torch.Tensor]) -> object:
    torch.compiler.reset()
    try:
        return call(torch.ones(2)).requires_grad
    except Exception as error:
        return type(error).__name__ + ": " + str(error).strip().splitlines()[0]


report(
    {name: told(step) for name, step in steps.items()},
    {name: told(torch.compile(step, backend="eager")) for name, step in steps.items()},
)
