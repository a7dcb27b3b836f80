# shrink_group looks for a backend of CUDA or the host alone, and raises RuntimeError on another accelerator
# unreported
# Seen on the sample accelerator (fixtures/vendors/sim; it has to be installed) with torch 2.13.0+cpu, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 accelerator_shrink.py
# It exits with 1 where the defect is there.

import os

import torch
import torch.distributed as dist

rank, device = int(os.environ["RANK"]), torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(rank)
dist.init_process_group(dist.get_default_backend_for_device(device))
dist.all_reduce(torch.ones(1, device=device))
observed = "nothing"
if rank == 0:
    try:
        dist.shrink_group([1])
    except (TypeError, RuntimeError) as e:
        observed = f"{type(e).__name__}: {e}"
    print(f"expected a group of one, or TypeError of a backend that does not shrink; observed {observed}")
os._exit(observed.startswith("RuntimeError"))
