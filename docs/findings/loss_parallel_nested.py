# a loss_parallel inside of another one raises KeyError at its end, or ends both
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 loss_parallel_nested.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional

dist.init_process_group("gloo", timeout=timedelta(seconds=120))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


mesh = init_device_mesh("cpu", (size,))
logits, labels = torch.zeros(2, 4), torch.tensor([1, 3])
observed = ""
try:
    with loss_parallel():
        with loss_parallel():
            pass
        loss = functional.cross_entropy(distribute_tensor(logits, mesh, [Shard(1)]), labels)
        observed = str(round(loss.full_tensor().item(), 4))
except (KeyError, RuntimeError) as error:
    observed = f"{type(error).__name__}: {str(error).splitlines()[0]}"
report(str(round(functional.cross_entropy(logits, labels).item(), 4)), observed)
