# a store that is written in Python fails in a PrefixStore or in new_group once nothing else refers to it
# https://github.com/pytorch/pytorch/issues/106633
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 python_store_released.py
# It exits with 1 where the defect is there.

import gc
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

SHORT = timedelta(seconds=10)
rank = int(os.environ["RANK"])
real = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, False, timeout=SHORT)


class Store(dist.Store):
    def set(self, key: str, value: Any) -> None:
        real.set(key, value)

    def get(self, key: str) -> bytes:
        return real.get(key)

    def add(self, key: str, value: int) -> int:
        return real.add(key, value)

    def check(self, keys: list[str]) -> bool:
        return real.check(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        real.wait(keys, *timeout)


def attempt(call: Any) -> Any:
    try:
        return call()
    except RuntimeError as e:
        return f"RuntimeError: {str(e).splitlines()[0][:100]}"


def total() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=dist.new_group(timeout=SHORT))
    return tensor.item()


prefixed = dist.PrefixStore("prefix", Store())
dist.init_process_group("gloo", store=Store(), rank=rank, world_size=2, timeout=SHORT)
gc.collect()
observed = (attempt(lambda: prefixed.add(f"key of {rank}", 2)), attempt(total))
print(f"rank {rank}: expected (2, 2.0), observed {observed}", flush=True)
sys.exit(0 if observed == (2, 2.0) else 1)
