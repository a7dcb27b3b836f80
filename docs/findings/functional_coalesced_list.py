# a functional reduce-scatter of a list along another dimension than the first changes the caller's list
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_coalesced_list.py
# It exits with 1 where the defect is there: the second call with the list returns other numbers, silently.

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

dist.init_process_group("gloo")
rank = dist.get_rank()
given = [torch.arange(8.0).view(2, 4)]
group = dist.group.WORLD
first, second = (functional.reduce_scatter_tensor_coalesced(given, "sum", [1], group)[0].tolist() for _ in range(2))
print(f"rank {rank}: expected twice {first}, observed then {second}", flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(first != second)
