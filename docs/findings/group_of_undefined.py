# Once torch.distributed.fsdp is imported, a group of "cpu:gloo" says that its backend is undefined
# https://github.com/pytorch/pytorch/issues/167305
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 group_of_undefined.py
# It exits with 1 where the defect is there: where any backend has been registered, a group of a backend that is named
# for its device has no default one, unless it has NCCL. Importing FSDP registers the fake one.

import sys

import torch.distributed as dist

dist.init_process_group("gloo")
observed = [dist.new_group(backend="cpu:gloo").name()]
import torch.distributed.fsdp  # noqa: E402, F401

observed.append(dist.new_group(backend="cpu:gloo").name())
expected = ["gloo", "gloo"]
print(f"expected {expected}, observed {observed}", flush=True)
dist.destroy_process_group()
sys.exit(observed != expected)
