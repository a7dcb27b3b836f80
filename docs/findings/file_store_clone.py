# the clone of a FileStore silently has a timeout of 300 s, whatever that of the store is
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 file_store_clone.py
# It exits with 1 where the defect is there.

import sys
import tempfile
from datetime import timedelta

import torch.distributed as dist

store = dist.FileStore(tempfile.mkstemp()[1], 1)
store.set_timeout(timedelta(seconds=7))
print(f"expected {store.timeout}, observed {store.clone().timeout}", flush=True)
sys.exit(store.timeout != store.clone().timeout)
