# Compiled code waits for an irecv at once: if both ranks call it before isend, as usual, they wait for each other
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_received_first.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=10))
rank, size = dist.get_rank(), dist.get_world_size()


def exchange(x: torch.Tensor, peer: int) -> torch.Tensor:
    received = torch.empty_like(x)
    works = [dist.irecv(received, peer), dist.isend(x, peer)]
    for work in works:
        work.wait()  # type: ignore[union-attr]
    return received * 2


expected = observed = exchange(torch.full((2,), 1.0 + rank), 1 - rank).tolist()
if hasattr(torch._dynamo.config, "enable_p2p_compilation"):  # since 2.12
    compiled = torch.compile(exchange, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(enable_p2p_compilation=True):
        try:
            observed = compiled(torch.full((2,), 1.0 + rank), 1 - rank).tolist()
        except RuntimeError as error:
            observed = str(error)
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
sys.exit(observed != expected)
