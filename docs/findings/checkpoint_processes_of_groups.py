# async_save in a process silently saves with the group of the first save, whatever process_group it is given
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_processes_of_groups.py
# It exits with 1 where the defect is there.

import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


def save(folder: str, group: dist.ProcessGroup | None) -> None:
    """Save this rank's number in another process, and wait for it."""
    kind = AsyncCheckpointerType.PROCESS
    state = {"number": torch.tensor([1.0 + dist.get_rank()])}
    checkpoint.async_save(state, checkpoint_id=folder, process_group=group, async_checkpointer_type=kind).result()


def main() -> None:
    """Save with all ranks, and then on each rank with a group of its own."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([one]) for one in range(size)]
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    save(folders[0], None)
    own = tempfile.mkdtemp()
    save(own, groups[rank])
    loaded = {"number": torch.zeros(1)}
    try:
        checkpoint.load(loaded, checkpoint_id=own, process_group=groups[rank])
        observed: object = loaded["number"].item()
    except checkpoint.CheckpointException as error:
        observed = str(error).strip().splitlines()[-1]
    print(f"rank {rank}: expected {1.0 + rank}, observed {observed}", flush=True)
    bad = torch.tensor([float(observed != 1.0 + rank)])
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


if __name__ == "__main__":
    main()
