"""The floor: ranks by a bare fork of a process that has torch imported, and a bare pipe to each.

Run as a program; reads a command a line, answers with seconds: ``start N`` forks N ranks, lets them join a gloo group,
and says how long it took until all had; ``live N`` keeps N ranks; ``round`` has the kept ranks do one all_reduce each;
``fork N`` forks N processes that end at once, one after another, and says how long the kernel took for each.  With the
argument ``huge``, its memory is in huge pages.
"""

from __future__ import annotations

import gc
import os
import resource
import socket
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from harness.worlds import pages


def join(rank: int, size: int, port: int, listener: int) -> None:
    options = {"master_listen_fd": listener} if rank == 0 else {}
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, timedelta(seconds=60), False, **options)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def fork_ranks(size: int) -> tuple[list[int], list[int], list[int]]:
    """Fork ranks that join a group; returns their pids, and pipes to and from each."""
    pids, to, back = [], [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for rank in range(size):
            order_r, order_w = os.pipe()
            reply_r, reply_w = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    for fd in (order_w, reply_r, *to, *back):
                        os.close(fd)
                    join(rank, size, listener.getsockname()[1], listener.fileno())
                    os.write(reply_w, b"r")
                    while os.read(order_r, 1):
                        dist.all_reduce(torch.ones(4))
                        os.write(reply_w, b"d")
                finally:
                    os._exit(0)
            os.close(order_r)
            os.close(reply_w)
            pids.append(pid)
            to.append(order_w)
            back.append(reply_r)
    return pids, to, back


def in_kernel() -> float:
    return sum(resource.getrusage(who).ru_stime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def fork(times: int) -> float:
    """Return the seconds in the kernel for a fork and its end."""
    before = in_kernel()
    for _ in range(times):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return (in_kernel() - before) / times


def main() -> None:
    for module in sys.argv[1].split(","):
        try:
            __import__(module)
        except ImportError:
            pass
    gc.collect()
    gc.freeze()
    if "huge" in sys.argv:
        pages.collapse()
    to: list[int] = []
    back: list[int] = []
    print("ready", flush=True)
    for line in sys.stdin:
        command, *rest = line.split()
        if command == "fork":
            print(fork(int(rest[0])), flush=True)
            continue
        began = time.perf_counter()
        if command == "round":
            for fd in to:
                os.write(fd, b"x")
            for fd in back:
                os.read(fd, 1)
        else:
            pids, new_to, new_back = fork_ranks(int(rest[0]))
            for fd in new_back:
                os.read(fd, 1)
            if command == "live":
                to, back = new_to, new_back
        seconds = time.perf_counter() - began
        if command == "start":
            for fd in (*new_to, *new_back):
                os.close(fd)
            for pid in pids:
                os.waitpid(pid, 0)
        print(seconds, flush=True)


main()
