# A full state silently mixes up the elements of a ShardedTensor that is not in even rows in the order of ranks
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 full_state_of_sharded_tensors.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


values = torch.arange(8.0).reshape(4, 2)
ways = {  # where each rank's shards are, as (row, column, rows, columns)
    "rows": [[(0, 0, 2, 2)], [(2, 0, 2, 2)]],
    "columns": [[(0, 0, 4, 1)], [(0, 1, 4, 1)]],
    "in another order": [[(2, 0, 2, 2)], [(0, 0, 2, 2)]],
    "two each": [[(0, 0, 1, 2), (2, 0, 1, 2)], [(1, 0, 1, 2), (3, 0, 1, 2)]],
}
observed = {}
for name, shards in ways.items():
    own = []
    for row, column, rows, columns in shards[rank]:
        part = values[row : row + rows, column : column + columns].contiguous()
        own.append(Shard.from_tensor_and_offsets(part, [row, column], rank))
    table = nn.Embedding(4, 2)
    table.register_state_dict_post_hook(
        lambda module, state, prefix, _, own=own: state.update({f"{prefix}weight": init_from_local_shards(own, 4, 2)})
    )
    whole = get_model_state_dict(nn.Sequential(table), options=StateDictOptions(full_state_dict=True))
    observed[name] = whole["0.weight"].flatten().tolist()
report(dict.fromkeys(ways, values.flatten().tolist()), observed)
