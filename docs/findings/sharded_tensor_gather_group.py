# ShardedTensor.gather fails in a group without the first ranks: it takes global ranks for ranks in the group
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=3 sharded_tensor_gather_group.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def gathered(destination: int) -> object:
    """Gather on a rank, the first of the group."""
    whole = torch.zeros(2) if rank == 1 else None
    try:
        sharded.gather(destination, whole)
    except (IndexError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None if whole is None else whole.tolist()


group = dist.new_group([1, 2])
expected: object = None
observed: object = None
if rank > 0:
    part = torch.tensor([float(rank)])
    shard = Shard.from_tensor_and_offsets(part, [rank - 1], rank)
    sharded = init_from_local_shards([shard], 2, process_group=group)
    expected = [1.0, 2.0] if rank == 1 else None
    by_world = gathered(1)
    by_group = by_world if by_world == expected else gathered(0)  # neither number of the rank works
    observed = expected if expected in (by_world, by_group) else {"as rank 1": by_world, "as rank 0": by_group}
report(expected, observed)
