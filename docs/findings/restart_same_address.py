# a default group that was destroyed can't be started again at the same address where rank 0 is late to leave
# https://github.com/pytorch/pytorch/issues/119196
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 restart_same_address.py
# It exits with 1 where the defect is there.

import os
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")  # rank 0 has the store of the group, and not torchrun
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
if rank == 0:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        store.set("port", str(found.getsockname()[1]))
address = f"tcp://127.0.0.1:{int(store.get('port'))}"

sums: list[object] = []
for _ in range(3):
    try:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=3))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        sums.append(tensor.item())
        if rank == 0:
            time.sleep(0.5)  # the others are back before rank 0, whose store it is, has gone
        dist.destroy_process_group()
    except RuntimeError as e:
        sums.append(f"{type(e).__name__}: {str(e).splitlines()[0]}")
        break
expected = [float(size)] * 3
print(f"rank {rank}: expected {expected}, observed {sums}", flush=True)
sys.exit(sums != expected)
