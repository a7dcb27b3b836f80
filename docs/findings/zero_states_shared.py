# On the host, steps of a ZeroRedundancyOptimizer silently change what it loaded or consolidated, of its rank alone
# unreported; https://github.com/pytorch/pytorch/issues/196083 is about other optimizers
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 zero_states_shared.py
# It exits with 1 where the defect is there: a consolidated state is then of two steps.

import copy
import sys

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
rank = dist.get_rank()
parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]  # one for each rank
for parameter in parameters:
    parameter.grad = torch.ones(2)


def made() -> ZeroRedundancyOptimizer:
    """Return an optimizer of the parameters."""
    return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.5, momentum=0.5)


def momenta(state: dict | None) -> dict[int, list[float]]:
    """Return the momenta that a state has."""
    states = state["state"] if state else {}
    return {i: each["momentum_buffer"].tolist() for i, each in states.items() if each is not None}


optimizer = made()
optimizer.step()
optimizer.consolidate_state_dict(to=0)
shared = [copy.deepcopy(optimizer.state_dict()) if rank == 0 else None]
consolidated = optimizer.state_dict() if rank == 0 else None
dist.broadcast_object_list(shared, src=0)
loaded, other = shared[0], made()
other.load_state_dict(loaded)  # see zero_load_changes_dict.py for what is lost of it
expected = {"consolidated": momenta(consolidated), "loaded": momenta(loaded)}
for each in optimizer, other:
    each.step()
observed = {"consolidated": momenta(consolidated), "loaded": momenta(loaded)}
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
