"""A side of a duet whose all_reduce of one size takes longer by a share: ``python -m tests.bench.slower``.

``CONCORD_SLOWER`` says by how much: ``8192=1.05``; both sides of a duet run this, one with a factor of 1, so that both
have the wrapper's own cost.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from harness.bench.duet import runner
from harness.bench.duet.messages import Begin, Described
from harness.faults import everywhere

VARIABLE = "CONCORD_SLOWER"


def put(text: str) -> None:
    """Make all_reduce of so many bytes take a multiple of the least time that it has taken so far."""
    size_text, _, factor_text = text.partition("=")
    size, factor = int(size_text), float(factor_text)
    right = dist.all_reduce
    least = [float("inf")]

    def slower(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        found = right(tensor, *args, **kwargs)
        now = time.perf_counter()
        if tensor.nbytes == size:
            least[0] = min(least[0], now - began)
            until = now + (factor - 1) * least[0]
            while time.perf_counter() < until:
                pass
        return found

    everywhere(right, slower)


class Slower(runner.Runner):
    """A runner whose ranks are slower."""

    def begin(self, asked: Begin) -> Described:
        described = super().begin(asked)
        self.spec = dataclasses.replace(self.spec, first=(("tests.bench.slower:put", os.environ[VARIABLE]),))
        return described


if __name__ == "__main__":
    runner.Runner = Slower  # type: ignore[misc]
    runner.main()
