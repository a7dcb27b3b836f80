# dcp_to_torch_save loses empty dicts: the state of an optimizer without states can't be loaded any more
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 checkpoint_converted_empty.py
# It exits with 1 where the defect is there.

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

dist.init_process_group("gloo")
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
checkpoint.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder[0])
with tempfile.NamedTemporaryFile() as file:
    dcp_to_torch_save(folder[0], file.name)
    observed = sorted(torch.load(file.name, weights_only=False)["optimizer"])
expected = ["param_groups", "state"]
print(f"rank {dist.get_rank()}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
