# Inductor, given a DTensor that nothing has waited for, runs what is cached for one that was waited for
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_late_dtensor.py
# It exits with 1 where the defect is there, and dies of a segmentation fault with "waited-for" as argument.

import sys
import tempfile
from datetime import timedelta
from os import environ

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

# The key of the cache says nothing of the class of a DTensor's local tensor, here Tensor or AsyncCollectiveTensor.
# "late" first: 'Tensor' object has no attribute 'elem'. Then the other: a kernel is given a tensor without memory.
with tempfile.TemporaryDirectory() as empty:
    environ["TORCHINDUCTOR_CACHE_DIR"] = empty
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    function = torch.compile(lambda x: x + 1)
    observed = []
    for late in (False, True) if "waited-for" in sys.argv else (True, False):
        given = DTensor.from_local(torch.arange(2.0), mesh, [Partial()])
        given = given.redistribute(placements=[Replicate()], async_op=late)
        try:
            observed.append(str(function(given).to_local().tolist()))
        except Exception as error:
            observed.append(type(error).__name__ + ": " + str(error).splitlines()[0])
        print(f"rank {rank}: late: {late}; expected [1.0, 3.0], observed {observed[-1]}", flush=True)
    dist.destroy_process_group()
sys.exit(observed != ["[1.0, 3.0]"] * 2)
