"""One all_reduce of four floats, three times, each on ranks from torch.multiprocessing.spawn."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZE = int(os.environ["BENCH_RANKS"])


def all_reduce(rank, port):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=SIZE)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [SIZE] * 4
    dist.destroy_process_group()


@pytest.mark.parametrize("number", range(3))
def test_all_reduce(number):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(all_reduce, (port,), SIZE)
