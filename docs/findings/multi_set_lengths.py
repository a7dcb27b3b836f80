# multi_set of a HashStore or FileStore with fewer values than keys reads memory past the values
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 multi_set_lengths.py
# It exits with 1 where the defect is there.

import sys

import torch.distributed as dist

store = dist.HashStore()
try:
    store.multi_set(["a", "b"], ["1"])
    observed = "no error"
except (RuntimeError, MemoryError) as error:
    observed = f"{type(error).__name__}: {error}"
print(f"expected an error of the store, observed {observed}", flush=True)
sys.exit(not observed.startswith("DistStoreError"))
