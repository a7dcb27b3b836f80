# async_save with no_dist in a process waits for all ranks, although one rank is to save alone
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_process_alone.py
# It exits with 1 where the defect is there.

import os
import sys
import tempfile
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


def save(folder: str, saved: list[str]) -> None:
    """Save in another process, by this rank alone."""
    kind = AsyncCheckpointerType.PROCESS
    future = checkpoint.async_save(
        {"number": torch.ones(1)}, checkpoint_id=folder, no_dist=True, async_checkpointer_type=kind
    )
    future.result()
    saved.extend(sorted(os.listdir(folder)))


def main() -> None:
    """Let rank 0 save, while the other does something else."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=25))
    saved: list[str] = []
    if dist.get_rank() == 0:
        saver = threading.Thread(target=save, args=(tempfile.mkdtemp(), saved), daemon=True)
        saver.start()
        saver.join(15)
        print(f"expected {['.metadata', '__0_0.distcp']}, observed {saved or 'that it still waits'}", flush=True)
        os._exit(0 if saved else 1)
    threading.Event().wait(17)
    sys.exit(0)


if __name__ == "__main__":
    main()
