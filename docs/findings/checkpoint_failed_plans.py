# With cached plans, a save after one that failed in the storage writer's plan silently lacks data
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_failed_plans.py
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


class Writer(checkpoint.FileSystemWriter):
    fails = False

    def prepare_global_plan(self, plans: list) -> list:
        if self.fails:
            raise OSError("no space")
        return super().prepare_global_plan(plans)


folders = [tempfile.mkdtemp() for _ in range(3)]
dist.broadcast_object_list(folders)
own = {f"own {rank}": torch.ones(2)}
more = {**own, "added": torch.ones(2)} if rank else own
for folder, state, fails in zip(folders, (own, more, more), (False, True, False), strict=True):
    writer = Writer(folder)
    writer.fails = fails
    try:
        checkpoint.save(state, storage_writer=writer, planner=checkpoint.DefaultSavePlanner(enable_plan_caching=True))
    except checkpoint.CheckpointException:
        assert fails
loaded = {"added": torch.zeros(2)}
try:
    checkpoint.load(loaded, checkpoint_id=folders[2])
except checkpoint.CheckpointException as error:
    report([1.0, 1.0], str(error).strip().splitlines()[-1])
report([1.0, 1.0], loaded["added"].tolist())
