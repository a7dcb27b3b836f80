# With cached plans, a save by fewer ranks than before silently lacks data: the plans of the other group are taken
# https://github.com/pytorch/pytorch/pull/158767
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_plans_of_groups.py
# It exits with 1 where the defect is there.

import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


def save(folder: str, **options: object) -> None:
    """Save two tensors with cached plans."""
    state = {"a": torch.ones(4), "b": torch.ones(4)}
    checkpoint.save(
        state, checkpoint_id=folder, planner=checkpoint.DefaultSavePlanner(enable_plan_caching=True), **options
    )


folders = [tempfile.mkdtemp() for _ in range(2)]
dist.broadcast_object_list(folders)
alone = dist.new_group([0])
save(folders[0])  # each rank writes one of the tensors
if rank == 0:
    save(folders[1], process_group=alone)
dist.barrier()
loaded = {"a": torch.zeros(4), "b": torch.zeros(4)}
try:
    checkpoint.load(loaded, checkpoint_id=folders[1])
except checkpoint.CheckpointException as error:
    report([4.0, 4.0], str(error).strip().splitlines()[-1])
report([4.0, 4.0], [tensor.sum().item() for tensor in loaded.values()])
