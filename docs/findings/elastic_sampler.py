# ElasticDistributedSampler raises AssertionError if fewer samples are left than half the ranks
# https://github.com/pytorch/pytorch/issues/49172 (of DistributedSampler, where it was mended)
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=1 elastic_sampler.py
# It exits with 1 where the defect is there.

import sys
from typing import Any

from torch.distributed.elastic.utils.data import ElasticDistributedSampler

data: Any = range(10)
try:
    observed: Any = [list(ElasticDistributedSampler(data, 4, rank, start_index=9)) for rank in range(4)]
except AssertionError:
    observed = "AssertionError"
print(f"expected {[[9]] * 4}, observed {observed}", flush=True)
sys.exit(observed != [[9]] * 4)
