# after an add() to a text, which raises an error, the store's connection is closed: every later call fails
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 store_add_to_text.py
# It exits with 1 where the defect is there.

import sys
from datetime import timedelta

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
store.set("text", "no number")
try:
    store.add("text", 1)
except (RuntimeError, ValueError) as error:
    print(f"add raises {type(error).__name__}")
try:
    observed = str(store.get("text"))
except RuntimeError as error:
    observed = type(error).__name__
print(f"expected {b'no number'}, observed {observed}", flush=True)
sys.exit(observed != "b'no number'")
