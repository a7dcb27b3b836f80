# Compiled by AOTAutograd, torch.stack of a tuple does not ask __torch_function__ of the class of its tensors
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_tuple_of_subclasses.py
# It exits with 1 where the defect is there.

import sys
from collections.abc import Callable
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


class Answering(torch.Tensor):
    """A tensor whose class answers torch.stack with seven."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.tensor(7.0) if func is torch.stack else super().__torch_function__(func, types, args, kwargs or {})


steps: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "list": lambda a: torch.stack([a, a]),
    "tuple": lambda a: torch.stack((a, a)),
}


def told(call: Callable[[torch.Tensor], torch.Tensor]) -> object:
    torch.compiler.reset()
    try:
        return call(torch.ones(2).as_subclass(Answering)).tolist()
    except Exception as error:
        return type(error).__name__ + ": " + str(error).strip().splitlines()[0]


report(
    {name: told(step) for name, step in steps.items()},
    {name: told(torch.compile(step, backend="aot_eager")) for name, step in steps.items()},
)
