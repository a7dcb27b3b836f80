# after compiled code set a parameter's data to a collective's result, the gradient of an earlier loss can't be taken
# https://github.com/pytorch/pytorch/issues/139152
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_parameter_data.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def average(parameter: torch.Tensor) -> None:
    parameter.data = functional.all_reduce(parameter.detach(), "sum", dist.group.WORLD) / size


outcomes: list[object] = []
for call in average, torch.compile(average, backend="aot_eager"):
    parameter = torch.nn.Parameter(torch.full((2,), float(rank)))
    loss = parameter.square().sum()
    call(parameter)
    try:
        loss.backward()
        outcomes.append((parameter.tolist(), parameter.grad.tolist()))
    except RuntimeError as error:
        outcomes.append(str(error)[:100])
report(*outcomes)
