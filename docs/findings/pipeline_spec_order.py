# Pipelines silently split keyword arguments and merge outputs by positions of their specifications, not by names
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 pipeline_spec_order.py
# It exits with 1 where the defect is there.

import sys

import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks

values = {"rows": torch.zeros(4, 4), "columns": torch.zeros(4, 4)}
specs = {"columns": TensorChunkSpec(1), "rows": TensorChunkSpec(0)}
_, parts = split_args_kwargs_into_chunks((), values, 2, None, specs)
merged = merge_chunks([{"rows": torch.zeros(2, 4), "columns": torch.zeros(4, 2)}] * 2, specs)
observed = [{name: tuple(given[name].shape) for name in values} for given in (parts[0], merged)]
expected = [{"rows": (2, 4), "columns": (4, 2)}, {"rows": (4, 4), "columns": (4, 4)}]
print(f"expected {expected}, observed {observed}", flush=True)
sys.exit(observed != expected)
