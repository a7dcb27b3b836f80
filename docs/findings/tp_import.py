# torch.distributed.tensor.parallel.fsdp can't be imported before torch.distributed.fsdp: they import each other
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 tp_import.py
# It exits with 1 where the defect is there.
# Python: fresh

from torch.distributed.tensor.parallel.fsdp import DTensorExtensions  # raises, and torchrun ends with 1

print(f"rank 0: expected a class, observed {DTensorExtensions}")
