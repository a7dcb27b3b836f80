"""Random operations on DTensors whose ranks have the same seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.placements import part
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"
NO_MULTINOMIAL = pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, DTensor has no multinomial")
DRAWN: dict[str, Callable[[DTensor], Any]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "dropout": functional.dropout,
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "initialized": lambda x: nn.init.kaiming_uniform_(x.clone()),
}


@requirement(
    "TP-RAND-01",
    "With one seed on all ranks, a random operation on a DTensor gives replicas the same values on every rank.",
    source="torch/distributed/tensor/_random.py: OffsetBasedRNGTracker",
)
@requirement(
    "TP-RAND-02",
    "A random operation on a DTensor draws other values than the one before, and the same ones after the same seed.",
    source="torch.manual_seed; torch/distributed/tensor/_random.py: OffsetBasedRNGTracker",
)
@pytest.mark.world(2)
def test_replicas(world: World) -> None:
    """Draw twice with each operation from a replicated and from a sharded tensor, then again after the same seed."""

    def body(rank: Rank) -> dict[str, list[Any]]:
        mesh = rank.mesh()
        layouts: tuple[Placement, ...] = (Replicate(), Shard(0))
        drawn: dict[str, list[Any]] = {}
        for again in range(2):
            torch.manual_seed(7)
            for name in DRAWN:
                for layout in layouts:
                    x = distribute_tensor(torch.ones(4, 6, device=rank.device), mesh, [layout], src_data_rank=None)
                    found = [DRAWN[name](x) for _ in range(2)]
                    assert [y.placements for y in found] == [(layout,)] * 2, name
                    local = [y.to_local().tolist() for y in found]
                    assert local[0] != local[1], name
                    assert drawn.setdefault(f"{name}, {layout}", local) == local, f"{name}, {again=}"
            drawn.setdefault("plain", torch.rand(3, device=rank.device).tolist())
        return {name: values for name, values in drawn.items() if "S(" not in name}

    results = world.run(body)
    assert_on_ranks([results[0]] * world.size, results)


OF_SUMS: dict[str, Callable[[Any], Any]] = {
    "bernoulli": torch.bernoulli,
    "multinomial": lambda x: torch.multinomial(x, 1),
    "multinomial with replacement": lambda x: torch.multinomial(x, 1, replacement=True),
}
"""Random operations that depend on the elements of a tensor."""


@requirement(
    "TP-RAND-460",
    "A random operation on a DTensor with a pending reduction draws from the reduced tensor, the same on every rank.",
    source=f"{SOURCE}; torch.bernoulli, multinomial; Partial: pending reduction",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, random operations refuse pending reductions")
@pytest.mark.world(2)
def test_pending(world: World) -> None:
    """Each row of what is reduced has a single one, by which results are certain; in place, all are refused."""

    def body(rank: Rank) -> tuple[list[str], list[Any]]:
        mesh, wrong, drawn = rank.mesh(), [], []
        whole = torch.eye(4, device=rank.device).roll(1, 0)
        torch.manual_seed(7)
        for op, (name, draw) in itertools.product(("sum", "avg", "max", "min"), OF_SUMS.items()):
            other = {"sum": 1 - whole, "avg": 3 - whole, "max": whole - 1, "min": whole + 1}[op]
            first = {"sum": 2 * whole - 1, "avg": 3 * whole - 3}.get(op, whole)
            x = DTensor.from_local((first, other)[rank.index], mesh, [Partial(op)])
            found = draw(x).full_tensor()
            drawn.append(found.tolist())
            expected = whole.argmax(1, keepdim=True) if name.startswith("multinomial") else whole
            if not torch.equal(expected, found):
                wrong.append(f"{name} of {op}: {found.tolist()}")
        for change in ("normal_", "uniform_", "bernoulli_"):
            pending = DTensor.from_local(whole.clone(), mesh, [Partial()])
            try:
                getattr(pending, change)()
            except RuntimeError:
                if not torch.equal(whole, pending.to_local()):
                    wrong.append(f"{change}: changed, though refused")
                continue
            wrong.append(f"{change}: not refused")
        return wrong, drawn

    results = world.run(body)
    assert_on_ranks([([], results[0][1])] * world.size, results)


@requirement(
    "TP-RAND-03",
    "multinomial of a DTensor draws from each row's own probabilities, in the placements of a sharded batch.",
    source="torch.multinomial; torch.distributed.tensor.DTensor",
)
@NO_MULTINOMIAL
@pytest.mark.world(2)
def test_multinomial(world: World) -> None:
    """Rows allow as many of the categories as are drawn; they are sharded, whole, or have sharded categories."""

    def body(rank: Rank) -> dict[str, Any]:
        drawn = {}
        # the sizes differ by count, because test_counts_of_samples is about equal ones
        for layout, (count, size) in itertools.product((Shard(0), Shard(1), Replicate()), ((1, 7), (2, 8), (3, 9))):
            torch.manual_seed(7)
            chances, rows = torch.zeros(size, 6), torch.arange(size)
            for i in range(count):
                chances[rows, (rows + 2 * i) % 6] = 1.0 + i
            given = distribute_tensor(chances.to(rank.device), rank.mesh(), [layout], src_data_rank=None)
            for replacement in (True, False):
                found: Any = torch.multinomial(given, count, replacement=replacement)
                what = f"{layout}, {count=}, {replacement=}"
                assert isinstance(found, DTensor), what
                assert (found.shape, found.dtype) == ((size, count), torch.int64), what
                assert found.placements == (layout if layout == Shard(0) else Replicate(),), what
                values = found.full_tensor().cpu()
                assert (chances.gather(1, values) > 0).all(), what
                if not replacement:
                    assert all(len(set(row)) == count for row in values.tolist()), what
                drawn[what] = values.tolist()
        return drawn

    results = world.run(body)
    assert_on_ranks([results[0]] * world.size, results)


@requirement(
    "TP-OP-01",
    "An operator on DTensors gives the result of plain tensors, or raises an error on every rank, for any placements.",
    source=SOURCE,
)
@NO_MULTINOMIAL
@pytest.mark.world(2)
def test_counts_of_samples(world: World) -> None:
    """Draw several numbers of samples from the same rows, whose probabilities are sharded, whole, or cut."""

    def body(rank: Rank) -> dict[str, tuple[Any, Any]]:
        found = {}
        for layout in Shard(0), Shard(1), Replicate():
            given = distribute_tensor(torch.ones(7, 6, device=rank.device), rank.mesh(), [layout], src_data_rank=None)
            for count in 1, 3, 2:
                drawn: Any = torch.multinomial(given, count)
                found[f"{layout}, {count}"] = (tuple(drawn.shape), tuple(drawn.full_tensor().shape))
        return found

    cases = itertools.product((Shard(0), Shard(1), Replicate()), (1, 3, 2))
    right = {f"{layout}, {count}": ((7, count), (7, count)) for layout, count in cases}
    assert_on_ranks([right] * world.size, world.run(body))


@requirement(
    "TP-RAND-02",
    "A random operation on a DTensor draws other values than the one before, and the same ones after the same seed.",
    source="torch.manual_seed; torch/distributed/tensor/_random.py: OffsetBasedRNGTracker",
)
@pytest.mark.world(2)
def test_generators(world: World) -> None:
    """Whatever the default seed is, equal generators give equal values, and the default generator stays as it is."""
    drawn: dict[str, Callable[..., Any]] = {
        "uniform_": lambda x, given: x.uniform_(generator=given),
        "normal_": lambda x, given: x.normal_(generator=given),
        "bernoulli_": lambda x, given: x.bernoulli_(0.5, generator=given),
    }

    def body(rank: Rank) -> list[str]:
        wrong = []
        for (name, draw), layout in itertools.product(drawn.items(), (Replicate(), Shard(0))):
            values, defaults = [], []
            for seed in 7, 8:
                x = distribute_tensor(torch.ones(8, 6, device=rank.device), rank.mesh(), [layout], src_data_rank=None)
                torch.manual_seed(seed)
                draw(x, torch.Generator(rank.device).manual_seed(1))
                values.append(x.to_local().tolist())
                defaults.append(torch.rand(3, device=rank.device).tolist())
            torch.manual_seed(8)
            if values[0] != values[1]:
                wrong.append(f"{name} of {layout} depends on the default generator")
            if defaults[1] != torch.rand(3, device=rank.device).tolist():
                wrong.append(f"{name} of {layout} advances the default generator")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-RAND-34",
    "The gradient of a drawn DTensor is zero in its placements, or the gradient of those elements that it keeps.",
    source="torch.bernoulli; torch.nn.functional.dropout; torch.distributed.tensor.DTensor",
)
@requirement(
    "TP-RAND-35",
    "A random operation on a DTensor of the meta device, given a device, draws there in the placements that it has.",
    source="torch.rand_like, torch.empty_like: device; test_random_ops.py: test_meta_tensor_init",
)
@pytest.mark.world(2)
def test_gradients_and_devices(world: World) -> None:
    """Draw from probabilities, drop elements, and make tensors from uneven ones without memory."""

    def body(rank: Rank) -> None:
        mesh = rank.mesh()
        for layout in Replicate(), Shard(0), Shard(1):
            whole = torch.full((5, 3), 0.5, device=rank.device)
            for name, draw in (("bernoulli", torch.bernoulli), ("dropout", functional.dropout)):
                torch.manual_seed(7)
                x = distribute_tensor(whole, mesh, [layout], src_data_rank=None).requires_grad_()
                drawn: Any = draw(x)
                drawn.backward(distribute_tensor(torch.ones_like(whole), mesh, [layout], src_data_rank=None))
                gradient: Any = x.grad
                due = torch.zeros_like(drawn.to_local()) if name == "bernoulli" else drawn.to_local() * 2
                assert gradient.placements == drawn.placements == (layout,), f"{name} of {layout}"
                assert_same(due.detach(), gradient.to_local(), f"{name} of {layout}")
            empty = distribute_tensor(torch.empty(5, 3, device="meta"), mesh, [layout])
            made: dict[str, Any] = {
                "rand_like": torch.rand_like(empty, device=rank.device),
                "randn_like": torch.randn_like(empty, device=rank.device),
                "uniform_": torch.empty_like(empty, device=rank.device).uniform_(),
                "normal_": nn.init.normal_(torch.empty_like(empty, device=rank.device)),
            }
            for name, found in made.items():
                what = f"{name} of {layout}"
                assert (found.device.type, found.is_meta, found.shape) == (rank.device.type, False, (5, 3)), what
                assert (found.placements, found.stride()) == ((layout,), (3, 1)), what
                local = found.to_local()
                assert local.shape == part(whole, rank, layout).shape, what
                assert not local.is_meta, what
                assert len(set(local.flatten().tolist())) == local.numel(), what

    world.run(body)
