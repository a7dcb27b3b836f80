# A context_parallel within a loss_parallel within a context_parallel ends the loss_parallel, whose end is a KeyError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 context_parallel_ends_loss.py
# It exits with 1 where the defect is there.

import sys
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
logits = distribute_tensor(torch.zeros(2, 4), mesh, [Shard(1)])
labels = distribute_tensor(torch.tensor([1, 3]), mesh, [Replicate()])


def shared() -> AbstractContextManager[None]:
    """Share a tensor among the ranks."""
    return context_parallel(mesh, buffers=[torch.arange(8)], buffer_seq_dims=[0])


observed = []
try:
    with shared(), loss_parallel():
        for block in (shared(), nullcontext()):
            with block, CommDebugMode() as counts:
                cross_entropy(logits, labels)
            observed.append("gathers" if any("gather" in str(op) for op in counts.get_comm_counts()) else "reduces")
except KeyError:
    observed.append("KeyError")
expected = ["reduces", "reduces"]  # what the loss does in the block, and after it
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
