# With compile_on_one_rank, graphs contain the name of a group, which differs by rank
# unreported
# Seen with torch 2.11.0+cu130, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_own_group.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
own = init_device_mesh("cpu", (dist.get_world_size(), 1)).get_group(1)
graphs = []


def kept(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    graphs.append(str([(str(node.target), *map(str, node.args)) for node in module.graph.nodes]))
    return module.forward


def call(x: torch.Tensor) -> torch.Tensor:
    x = x * 2
    dist.all_reduce(x, group=own)
    return x


with dist.config.patch(compile_on_one_rank=True):
    torch.compile(call, backend=kept, fullgraph=True)(torch.ones(2))
every = [""] * dist.get_world_size()
dist.all_gather_object(every, graphs[0])
expected, observed = "equal graphs", "equal graphs" if len(set(every)) == 1 else "different graphs"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(0 if observed == expected else 1)
