# DDP silently does not wait for delayed all-reduces: after the backward, gradients are not averaged yet
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 ddp_delayed_unfinished.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()

reduce = dist.all_reduce


class Pending:
    """An all-reduce that is done as late as it may be: when it is waited for."""

    def __init__(self, *given):
        self.given = given

    def wait(self):
        reduce(*self.given)


def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
    return Pending(tensor, op, group) if async_op else reduce(tensor, op, group)


module = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
for parameter in module.parameters():
    torch.nn.init.ones_(parameter)
model = DistributedDataParallel(
    module,
    delay_all_reduce_named_params=[("1.weight", module[1].weight)],
    param_to_hook_all_reduce=module[0].weight,
)
dist.all_reduce = all_reduce
model(torch.full((1, 1), 1.0 + rank)).sum().backward()
observed, expected = [parameter.grad.item() for parameter in module.parameters()], [1.5, 1.5]
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.all_reduce = reduce
dist.destroy_process_group()
sys.exit(observed != expected)
