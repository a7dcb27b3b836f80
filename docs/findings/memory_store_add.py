# who waits for a key of a HashStore does not notice add(): get returns only when the timeout is over
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 memory_store_add.py
# It exits with 1 where the defect is there.

import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

store = dist.HashStore()
store.set_timeout(timedelta(seconds=5))
took = []


def wait() -> None:
    store.get("key")
    took.append(time.monotonic() - began)


thread = threading.Thread(target=wait)
thread.start()
time.sleep(0.3)
began = time.monotonic()
store.add("key", 1)
thread.join()
print(f"expected get to return at once, observed after {took[0]:.1f} s", flush=True)
sys.exit(took[0] > 2)
