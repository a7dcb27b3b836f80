# Inductor's overlap scheduling of coalesced collectives and another one after them is an AssertionError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_overlap_coalesced.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config
from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing_from_inductor_configs
from torch.utils import _runtime_estimation

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()
for name in "get_gpu_dram_gbps", "get_device_dram_gbps", "get_device_tflops":
    setattr(_runtime_estimation, name, lambda *_, **__: 1)  # Triton is asked otherwise, which the host doesn't have


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def step(x: torch.Tensor) -> list[torch.Tensor]:
    one, other = functional.all_reduce_coalesced([x, x + 1], "sum", dist.group.WORLD)
    third = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    return [one, other, third @ x]


def scheduled(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Schedule a graph as Inductor's pass after gradients does, and run it without generating code."""
    schedule_overlap_bucketing_from_inductor_configs(graph)
    return graph.forward


options = {"enable_overlap_scheduling": True, "compute_estimator": "analytical"}
known = {key: value for key, value in options.items() if hasattr(config.aten_distributed_optimizations, key)}
with config.patch({f"aten_distributed_optimizations.{key}": value for key, value in known.items()}):
    try:
        results = torch.compile(step, backend=aot_autograd(fw_compiler=scheduled))(torch.ones(4, 4))
        observed: object = [result[0, 0].item() for result in results]
    except Exception as error:
        observed = f"{type(error).__name__}: {error}".splitlines()[:2]
report([1.0 * size, 2.0 * size, 8.0 * size], observed)
