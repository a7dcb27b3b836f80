# a pending result of a collective, or a DTensor that has one, is silently saved with the numbers from before
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 functional_saved_early.py
# It exits with 1 where the defect is there.

import io
import pickle
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size,))


def pending() -> DTensor:
    """Return the sum of 1 and 2, which is taken when rank 1 comes."""
    dist.barrier()
    time.sleep(0.3 * rank)
    parts = DTensor.from_local(torch.full((2,), 1.0 + rank), mesh, [Partial()])
    return parts.redistribute(placements=[Replicate()], async_op=True)


def saved(value: object) -> torch.Tensor:
    """Save and load again."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, weights_only=False)
    return loaded


found = {
    "torch.save of a DTensor": saved(pending()).to_local().tolist(),  # type: ignore[attr-defined]
    "torch.save of its local tensor": saved(pending().to_local()).tolist(),
    "pickle": pickle.loads(pickle.dumps(pending().to_local())).tolist(),
}
report({name: [3.0, 3.0] for name in found}, found)
