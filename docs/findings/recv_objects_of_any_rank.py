# recv_object_list refuses to receive from any rank, which is its documented default: ValueError
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 recv_objects_of_any_rank.py
# It exits with 1 where the defect is there.

import sys

import torch.distributed as dist

dist.init_process_group("gloo")
bad = False
if dist.get_rank() == 0:
    try:
        dist.send_object_list(["x", 3], dst=1)
    except RuntimeError:
        print("rank 0: rank 1 has left", flush=True)
else:
    objects = [None, None]
    try:
        observed = (dist.recv_object_list(objects), objects)  # recv(tensor) without a source takes what rank 0 sends
    except ValueError as e:
        observed = f"ValueError: {e}"
    expected = (0, ["x", 3])
    print(f"rank 1: expected {expected}, observed {observed}", flush=True)
    bad = observed != expected
sys.exit(bad)
