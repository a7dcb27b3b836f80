"""A rank of torchrun that is told by a bare socket when to all-reduce: the floor under a run on several hosts.

``told.py PORT``: it connects to that port of this host, and answers each byte with a byte once an all-reduce is done.
"""

from __future__ import annotations

import socket
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
sock = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while sock.recv(1):
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    sock.sendall(b"d")
dist.destroy_process_group()
