"""The floor of a figure: ranks started by hand, and the loop that anybody would write.

One process a rank, as torchrun would start it; for ``BYTES COUNT`` on a line it answers with the seconds of iterations.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist


def loop(size: int, count: int) -> list[float]:
    """Seconds of each of ``count`` all_reduces of so many bytes, after some that are not counted."""
    tensor = torch.zeros(size // 4)
    for _ in range(5):
        dist.all_reduce(tensor)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        dist.all_reduce(tensor)
        times.append(time.perf_counter() - start)
    return times


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(loop(*map(int, line.split()))), flush=True)


if __name__ == "__main__":
    main()
