"""Counts of a CommDebugMode for modules that have others inside, in its tables and files as well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from harness import Rank, World, requirement

Counts = dict[str, dict[str, dict[str, int]]]
SUM: Any = "all_reduce"
"""What a layer may do besides calling those inside it."""
LAYERS: dict[str, tuple[Any, ...]] = {
    "alone": (SUM,),
    "twice": (SUM, SUM),
    "inside": ((SUM,),),
    "after": ((), SUM),
    "before": (SUM, ()),
    "between": ((), SUM, ()),
    "everywhere": (SUM, (), SUM, (), SUM),
    "both": ((SUM,), SUM),
    "both before": (SUM, (SUM,)),
    "two": ((SUM,), (SUM,), SUM, SUM),
    "three levels": ((((), SUM), SUM), SUM),
    "one in three levels": ((((SUM,),),),),
    "none within": ((((), ()), ()), SUM),
}
"""Layers, by what they do in turn: sum over the ranks, or call a layer that does what is in its parentheses."""


class Summed(torch.autograd.Function):
    """Sum a tensor over the ranks, and take the first rank's gradient, so that each way has a collective of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Sum a copy."""
        result = x.clone()
        dist.all_reduce(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Broadcast a copy."""
        result = gradients[0].clone()
        dist.broadcast(result, 0)
        return result


class Layer(nn.Module):
    """A layer that does what it is told."""

    def __init__(self, steps: tuple[Any, ...]) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Identity() if step == SUM else Layer(step) for step in steps)
        self.sums = [step == SUM for step in steps]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take the steps in turn."""
        for step, is_sum in zip(self.steps, self.sums, strict=True):
            x = Summed.apply(x) if is_sum else step(x)
        return x * 2


def total(steps: tuple[Any, ...]) -> int:
    """Return how many sums are in a layer and in those inside it."""
    return sum(1 if step == SUM else total(step) for step in steps)


def sums(steps: tuple[Any, ...], name: str) -> Iterator[tuple[str, int]]:
    """Yield a layer and each one inside it with their sums."""
    yield name, total(steps)
    for i, step in enumerate(steps):
        if step != SUM:
            yield from sums(step, f"{name}.steps.{i}")


def sums_come_last(steps: tuple[Any, ...]) -> bool:
    """Say whether each layer sums only once those inside it have been called."""
    kinds = [step == SUM for step in steps]
    return kinds == sorted(kinds) and all(sums_come_last(step) for step in steps if step != SUM)


def expected(steps: tuple[Any, ...]) -> Counts:
    """Return the counts of each layer, without those that have none."""
    counts = dict(sums(steps, "Layer"))
    return {
        name: {"forward": {"c10d.allreduce_": count}, "backward": {"c10d.broadcast_": count}}
        for name, count in {"Global": counts["Layer"], **counts}.items()
        if count
    }


def counted(steps: tuple[Any, ...], rank: Rank) -> CommDebugMode:
    """Run a layer and its backward in a new mode."""
    model, x = Layer(steps), torch.ones(2, device=rank.device, requires_grad=True)
    with CommDebugMode() as mode:
        model(x).sum().backward()
    return mode


def told(mode: CommDebugMode) -> Counts:
    """Return the counts that a mode has, with operators by their names."""
    return {
        name: {way: {str(op): n for op, n in each.items()} for way, each in counts.items()}
        for name, counts in mode.comm_module_counts.items()
    }


@requirement(
    "TP-COMM-7900",
    "A CommDebugMode counts a collective once for the module that calls it and once for each module around that.",
    source="torch.distributed.tensor.debug.CommDebugMode: comm_module_counts; pytorch/pytorch#128887",
)
@pytest.mark.parametrize("way", ["forward", "backward", "backward of a sum before"])
@pytest.mark.world(2, keeps="hooks of a mode on tensors")
def test_counts(world: World, way: str) -> None:
    """Sum before, between and after the layers inside, which may sum themselves, in up to three levels."""
    way, before = way.split()[0], way.endswith("before")

    def body(rank: Rank) -> None:
        for name, steps in LAYERS.items():
            if way == "backward" and sums_come_last(steps) == before:
                continue
            mode, due = counted(steps, rank), expected(steps)
            found = told(mode)
            assert mode.get_total_counts() == 2 * due["Global"]["forward"]["c10d.allreduce_"], name
            assert {of: each[way] for of, each in found.items() if each[way]} == {
                of: each[way] for of, each in due.items()
            }, f"{name}, {way}"

    world.run(body)


def read_json(layer: dict[str, Any]) -> Iterator[tuple[str, dict[str, dict[str, int]]]]:
    """Yield the counts of each layer that has some, as a file has them."""
    counts = {way: dict(layer[f"collectives_{way}"]) for way in ("forward", "backward")}
    if any(counts.values()):
        yield layer["fqn"], counts
    for inside in layer["children"]:
        yield from read_json(inside)


def read_table(lines: list[str]) -> Counts:
    """Return the counts of each layer that has some, as a table has them."""
    counts: Counts = {}
    name = way = ""
    for line in map(str.strip, lines):
        if line in ("FORWARD PASS", "BACKWARD PASS"):
            way = line.split()[0].lower()
        elif line.startswith("*c10d"):
            op, count = line[1:].split(": ")
            counts.setdefault(name, {"forward": {}, "backward": {}})[way][op] = int(count)
        elif line == "Global" or line.startswith("Layer"):
            name = line
    return counts


@requirement(
    "TP-COMM-7901",
    "The table and the files of a CommDebugMode have its counts of each module, at every noise level.",
    source="torch.distributed.tensor.debug.CommDebugMode: generate_comm_debug_tracing_table, generate_json_dump, "
    "log_comm_debug_tracing_table_to_file: noise_level",
)
@pytest.mark.world(2, keeps="hooks of a mode on tensors")
def test_files(world: World, tmp_path: Any) -> None:
    """Write the counts of layers that sum after those inside them, and read them again."""

    def body(rank: Rank) -> None:
        for name, steps in LAYERS.items():
            if not sums_come_last(steps):
                continue
            mode, due = counted(steps, rank), expected(steps)
            for level in range(4):
                what = f"{name}, at level {level}"
                dump, log = (tmp_path / f"{rank.index}{ending}" for ending in (".json", ".txt"))
                mode.generate_json_dump(str(dump), noise_level=level)
                assert dict(read_json(json.loads(dump.read_text()))) == due, what
                mode.log_comm_debug_tracing_table_to_file(str(log), noise_level=level)
                assert read_table(log.read_text().splitlines()) == due, what
                table = mode.generate_comm_debug_tracing_table(noise_level=level)
                assert read_table(table.replace("\x1b[1;33m", "").replace("\x1b[0m", "").splitlines()) == due, what

    world.run(body)
