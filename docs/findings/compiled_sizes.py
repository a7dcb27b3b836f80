# Compiler collectives, by which ranks agree on sizes, fail on the host: in a message of theirs, or dividing by 0
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_sizes.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

# "gloo" alone: TypeError, since the group has several device types and the message about them joins no strings;
# "cpu:gloo": ZeroDivisionError, since the rank is taken modulo the number of accelerators.
dist.init_process_group("cpu:gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()

with torch._dynamo.config.patch(enable_compiler_collectives=True):
    try:
        observed = str(torch.compile(lambda x: x * 2, backend="eager")(torch.ones(4 + rank)).tolist())
    except Exception as error:
        observed = type(error).__name__ + ": " + str(error).splitlines()[0]
expected = str([2.0] * (4 + rank))
print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
