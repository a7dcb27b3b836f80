# After a graph break in its block, a torch function mode silently acts after the block, too, with backend="eager"
# https://github.com/pytorch/pytorch/issues/182317
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_mode_after_break.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Tens(TorchFunctionMode):
    """Multiplies by ten where torch.add is called."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.mul(args[0], 10) if func is torch.add else func(*args, **(kwargs or {}))


# The graph of what follows the break runs while the mode is still on. "aot_eager" and "inductor" call no functions
# that a mode sees, and are right.
def step(x: torch.Tensor) -> torch.Tensor:
    with Tens():
        x = torch.add(x, 1)
        torch._dynamo.graph_break()
    return torch.add(x, 1)


outcomes = []
for call in step, torch.compile(step, backend="eager"):
    result = call(torch.ones(1))
    dist.all_reduce(result)
    outcomes.append((result / size).item())
report(*outcomes)
