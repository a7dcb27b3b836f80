# The backward of a norm of a pending DTensor raises an error, as that of normalize, cosine_similarity and dist
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 dtensor_pending_norm_gradient.py
# It exits with 1 where the defect is there.
#
# Such a tensor comes from a product over a sharded dimension, as of RowwiseParallel without a redistribution. The
# derivative of the norm fills zeros in place into a product of it, which is pending too.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
functions = {
    "norm": lambda x: x.norm(),
    "normalize": lambda x: functional.normalize(x, dim=1).sum(),
    "cosine_similarity": lambda x: functional.cosine_similarity(x, 2 * x).sum(),
    "sum": lambda x: x.sum(),
}
expected = dict.fromkeys(functions, "a gradient")
observed = {}
for name, function in functions.items():
    left = distribute_tensor(torch.ones(3, 4), mesh, [Shard(1)]).requires_grad_()
    right = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    try:
        function(left @ right).full_tensor().backward()
        observed[name] = "a gradient" if left.grad is not None else "no gradient"
    except RuntimeError as error:
        observed[name] = str(error).splitlines()[0]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
