# list_keys of a FileStore silently has a part of a name of its own, which nobody set
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 file_store_keys.py
# It exits with 1 where the defect is there.

import sys
import tempfile

import torch.distributed as dist

store = dist.FileStore(tempfile.mkstemp()[1], 1)
store.set("mine", "")
if not hasattr(store, "list_keys"):
    print("this version has no list_keys")
    sys.exit(0)
observed = sorted(store.list_keys())
print(f"expected {['mine']}, observed {observed}", flush=True)
sys.exit(observed != ["mine"])
