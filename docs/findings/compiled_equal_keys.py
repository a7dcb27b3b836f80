# In compiled code, equal objects with own __eq__ and __hash__ are silently two keys of a dictionary or a set
# unreported
# Seen with torch 2.13.0+cpu, gloo, Python 3.11, Linux x86-64.
# Run:  torchrun --standalone --nproc-per-node=2 compiled_equal_keys.py
# It exits with 1 where the defect is there.

import sys
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, size = dist.get_rank(), dist.get_world_size()


def report(expected: object, observed: object) -> None:
    """Say on each rank what was expected and what came; leave with 1 on all ranks if it differs on any."""
    bad = torch.tensor([float(expected != observed)])
    print(f"rank {rank}: expected {expected}, observed {observed}", flush=True)
    dist.all_reduce(bad)
    dist.destroy_process_group()
    sys.exit(1 if bad.item() else 0)


class Key:
    """A key that equals those of the same name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(unsafe_hash=True)
class Record:
    """The same as a dataclass."""

    name: str


def step(x: torch.Tensor) -> torch.Tensor:
    keys, records = {Key("a"): 1}, {Record("a")}
    keys[Key("a")] = 2
    return x * torch.tensor([len(keys), int(Record("a") in records)])


outcomes = []
for call in step, torch.compile(step, backend="eager"):
    result = call(torch.ones(2))
    dist.all_reduce(result)
    outcomes.append((result / size).tolist())
report(*outcomes)
