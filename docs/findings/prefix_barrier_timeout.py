# barrier of a PrefixStore waits for 300 s, whatever timeout was set
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 prefix_barrier_timeout.py
# It exits with 1 where the defect is there.

import sys
import threading
from datetime import timedelta

import torch.distributed as dist

server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
store = dist.PrefixStore("prefix", server)
store.set_timeout(timedelta(seconds=1))
if not hasattr(store, "barrier"):
    print("this version has no barrier")
    sys.exit(0)
observed = []


def come() -> None:
    try:
        store.barrier("nobody else", 2)
    except RuntimeError as error:
        observed.append(type(error).__name__)


thread = threading.Thread(target=come, daemon=True)
thread.start()
thread.join(5)
print(f"expected an error after 1 s, observed {observed or 'nothing after 5 s'}", flush=True)
sys.exit(not observed)
