# With several reentrantly checkpointed layers in one module under FSDP1, a backward crashes, or averages only some
# https://github.com/pytorch/pytorch/pull/89781
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 fsdp_reentrant_layers.py
# It exits with 1 where the defect is there. Parameters are freed as soon as the backward within the last layer ends.
# With NO_SHARD and original parameters, which is shown first, gradients are silently not averaged.

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

warnings.simplefilter("ignore")  # of NO_SHARD, which is deprecated
dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def backward(strategy: ShardingStrategy) -> object:
    """Return the gradients of three layers, of which ranks have one and two."""
    layers = [checkpoint_wrapper(nn.Linear(1, 1, bias=False), CheckpointImpl.REENTRANT) for _ in range(3)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), "sharding_strategy": strategy}
    model = FullyShardedDataParallel(nn.Sequential(*layers), **options)
    try:
        model(torch.full((1, 1), 1.0 + rank, requires_grad=True)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return sorted({value for p in model.parameters() if p.grad is not None for value in p.grad.flatten().tolist()})


mean = [(1 + size) / 2]
report([mean, mean], [backward(ShardingStrategy.NO_SHARD), backward(ShardingStrategy.SHARD_GRAD_OP)])
