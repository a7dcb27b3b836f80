# list_keys of a PrefixStore silently has keys of stores with a prefix that begins like its own, cut
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 prefix_store_keys.py
# It exits with 1 where the defect is there.

import sys

import torch.distributed as dist

under = dist.HashStore()
store = dist.PrefixStore("group_1", under)
store.set("mine", "")
dist.PrefixStore("group_10", under).set("of another", "")
if not hasattr(store, "list_keys"):
    print("this version has no list_keys")
    sys.exit(0)
observed = sorted(store.list_keys())
print(f"expected {['mine']}, observed {observed}", flush=True)
sys.exit(observed != ["mine"])
