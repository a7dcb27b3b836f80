# A lazily conjugated DTensor that a product redistributes is silently not conjugated as a bias; as a factor, it raises
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_conjugated.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional

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
matrix, bias = torch.eye(4, dtype=torch.complex64), torch.tensor([1 + 1j, 2 + 2j, 3 + 3j, 4 + 4j])
columns, row = distribute_tensor(matrix, mesh, [Shard(1)]), distribute_tensor(bias, mesh, [Replicate()])
expected = functional.linear(matrix, matrix, bias.conj())[0].tolist()
found = functional.linear(columns, columns, row.conj()).full_tensor()[0].tolist()  # a row-wise layer
expected_factor = matrix[0].tolist()
try:
    rows = distribute_tensor(matrix, mesh, [Shard(0)])
    factor = (rows @ rows.conj()).full_tensor()[0].tolist()
except RuntimeError as error:  # on some ranks alone if others have no rows
    factor = [str(error).splitlines()[0]]
report((expected, expected_factor), (found, factor))
