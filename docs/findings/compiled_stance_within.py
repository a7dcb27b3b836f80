# A set_stance object entered within another stance leaves the stance in which it was made, not the one around it
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_stance_within.py
# It exits with 1 where the defect is there.

import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
compiled = torch.compile(lambda x: x + 1, backend="eager")

uncompiled = torch.compiler.set_stance("force_eager")
torch.compiler.set_stance("default")
with torch.compiler.set_stance("fail_on_recompile"):
    with uncompiled:
        compiled(torch.ones(1))
    try:
        compiled(torch.ones(1))  # it was never compiled, and this stance does not let it be
        observed = "compiled"
    except RuntimeError:
        observed = "an error"
print(f"rank {dist.get_rank()}: expected an error, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != "an error")
