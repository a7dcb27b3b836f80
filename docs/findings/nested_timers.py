# the end of a block with a time limit silently ends that of the block around it: a stuck process stays
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 nested_timers.py
# It exits with 1 where the defect is there.

import multiprocessing
import os
import sys
import time
from typing import Any

from torch.distributed.elastic import timer


def work(queue: Any) -> None:
    timer.configure(timer.LocalTimerClient(queue))
    with timer.expires(after=1):
        with timer.expires(after=60):
            pass
        time.sleep(5)  # stuck: to be killed after a second
    os._exit(0)


context = multiprocessing.get_context("fork")
queue: Any = context.Queue()
process = context.Process(target=work, args=(queue,))
process.start()
server = timer.LocalTimerServer(queue, max_interval=0.05)
server.start()
process.join()
server.stop()
observed = "killed" if process.exitcode == -9 else "not killed"
print(f"expected killed, observed {observed}", flush=True)
sys.exit(observed != "killed")
