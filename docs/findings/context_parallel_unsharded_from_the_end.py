# context_parallel_unshard mixes up heads, or raises, if the dimension of the sequence is counted from the end
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 context_parallel_unsharded_from_the_end.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()
mesh, long = init_device_mesh("cpu", (size,)), 4 * size
expected, observed = {}, {}
cases = {"three heads": (2, 3, long, 2), "as many heads as positions": (2, long, long, 2)}
for (name, shape), dim in ((case, dim) for case in cases.items() for dim in (2, -2)):
    buffer = torch.arange(float(torch.Size(shape).numel())).view(shape)
    whole = buffer.clone()
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[2]):
        part = buffer.clone()
    expected[name, dim] = "the whole buffer"
    try:
        (found,) = context_parallel_unshard(mesh, [part], [dim])
    except (IndexError, RuntimeError) as error:
        observed[name, dim] = f"{type(error).__name__}: {error}"
    else:
        observed[name, dim] = "the whole buffer" if torch.equal(whole, found) else "other elements"
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
