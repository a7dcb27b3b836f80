# the forward of an FSDP-replicate module does not wait for the event of set_post_optim_event
# unreported
# Seen on the sample accelerator (fixtures/vendors/sim; it has to be installed) with torch 2.13.0+cpu, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 accelerator_post_optim_event.py
# It exits with 1 where the defect is there.

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh

rank, device = int(os.environ["RANK"]), torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(rank)
dist.init_process_group(dist.get_default_backend_for_device(device))
layer = nn.Linear(1, 1, bias=False).to(device)
nn.init.ones_(layer.weight)
model = replicate(layer, mesh=init_device_mesh(device.type, (2,)))
x, a = torch.ones(1, 1, device=device), torch.zeros(2048, 2048, device=device)
model(x).sum().backward()
torch.accelerator.synchronize()
stream = torch.Stream(device=device)
with stream:  # the optimizer is late, and the module has an event of when it is done
    for _ in range(20):
        a @ a
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    model.set_post_optim_event(stream.record_event())
output = model(x).sum().detach()  # the all-gather streams wait for the event, but nothing waits for them
torch.accelerator.synchronize()
print(f"rank {rank}: expected 0.5, observed {float(output)}", flush=True)
os._exit(float(output) != 0.5)
