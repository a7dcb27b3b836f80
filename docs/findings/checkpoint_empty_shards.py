# A ShardedTensor with an empty shard at the offsets of a full one can't be saved, or not loaded: they are confused
# https://github.com/pytorch/pytorch/pull/150862
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_empty_shards.py
# It exits with 1 where the defect is there.

import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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


# Each rank's shards, as a number of rows and the first one. A checkpoint finds shards by their offsets: of two that
# start at the same row, the plan of a save keeps only the first, and a load reads the full one into the empty one.
# For DTensors, the pull request moved the offsets of empty shards to the end, which is where all others have ended.
SPLITS = {
    "empty before full": ([(0, 0)], [(2, 0)]),
    "empty on both ranks": ([(2, 0), (0, 2)], [(0, 2), (3, 2)]),
    "empty at the end": ([(2, 0)], [(0, 2)]),
}
observed = {}
for name, split in SPLITS.items():
    box = [tempfile.mkdtemp()]
    dist.broadcast_object_list(box, 0)
    rows = sum(length for part in split for length, _ in part)
    tensors = []
    for value in 1.0, 0.0:
        shards = [
            Shard.from_tensor_and_offsets(torch.full((length, 3), value), [start, 0], rank)
            for length, start in split[rank]
        ]
        tensors.append(init_from_local_shards(shards, rows, 3))
    saved, loaded = tensors
    try:
        dcp.save({"sharded": saved}, checkpoint_id=box[0])
        dcp.load({"sharded": loaded}, checkpoint_id=box[0])
        same = all(bool(shard.tensor.eq(1).all()) for shard in loaded.local_shards())
        observed[name] = "loaded" if same else "other values"
    except BaseException as error:  # a CheckpointException, which is no Exception
        observed[name] = type(error).__name__
report(dict.fromkeys(SPLITS, "loaded"), observed)
