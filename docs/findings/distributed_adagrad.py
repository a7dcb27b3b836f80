# DistributedOptimizer with Adagrad silently trains an unused parameter instead of a used one (a ValueError since 2.14)
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 distributed_adagrad.py
# It exits with 1 where the defect is there.

import sys
import tempfile

import torch
import torch.distributed.autograd as distributed_autograd
from torch.distributed import rpc
from torch.distributed.optim import DistributedOptimizer

options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tempfile.mkdtemp()}/rpc")
rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
optimizer = DistributedOptimizer(torch.optim.Adagrad, [rpc.RRef(p) for p in parameters], lr=0.5)
with distributed_autograd.context() as context:
    distributed_autograd.backward(context, [parameters[1].sum()])  # the first one is not used
    try:
        optimizer.step(context)
        observed = [round(p.item(), 6) for p in parameters]
    except ValueError as error:
        observed = str(error).splitlines()[1]
expected = [1.0, 0.5]
print(f"expected {expected}, observed {observed}", flush=True)
rpc.shutdown()
sys.exit(observed != expected)
