# wait of a HashStore or FileStore with a timeout of zero, or below a millisecond, never ends, where a TCPStore raises
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 store_no_timeout.py
# It exits with 1 where the defect is there.

import os
import threading
from datetime import timedelta

import torch.distributed as dist

observed = ["no error after 3 s"]
store = dist.HashStore()


def wait() -> None:
    try:
        store.wait(["key"], timedelta(microseconds=10))
    except RuntimeError:
        observed[0] = "an error"


thread = threading.Thread(target=wait, daemon=True)
thread.start()
thread.join(3)
print(f"expected an error, observed {observed[0]}", flush=True)
os._exit(observed[0] != "an error")
