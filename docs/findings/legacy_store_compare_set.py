# with use_libuv=False, who waits for a key of a TCPStore does not notice compare_set, and gets an error
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 legacy_store_compare_set.py
# It exits with 1 where the defect is there.

import sys
import threading
import time
from datetime import timedelta

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=3), wait_for_workers=False, use_libuv=False)
other = store.clone()
observed = ["an error"]


def wait() -> None:
    observed[0] = str(other.get("key"))


thread = threading.Thread(target=wait)
thread.start()
time.sleep(0.3)
store.compare_set("key", "", "1")
thread.join()
print(f"expected {b'1'}, observed {observed[0]}", flush=True)
sys.exit(observed[0] != "b'1'")
