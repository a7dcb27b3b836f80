"""DTensors whose flattened dimension was sharded inside: conversions to their placements, operators, and extremes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from fixtures.operators import floats, right
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.tensor.DTensor: a single-device abstraction over multi-device tensors"
SINCE = pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, views that flatten a sharded dimension are refused")


@requirement(
    "TP-FLATTEN-01",
    "A DTensor in any placements can be redistributed to those of a flattened view, and has its values there.",
    source="torch.distributed.tensor.DTensor: redistribute, view; torch/distributed/tensor/placement_types.py",
)
@SINCE
@pytest.mark.world(2)
def test_to_flattened(world: World) -> None:
    """Convert shards, replicas and a pending sum to interleaved shards of one and of two dimensions."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for shape, flat in (((4, 4), (16,)), ((2, 4, 3), (8, 3))):
            whole = torch.arange(float(torch.Size(shape).numel()), device=rank.device)
            to = distribute_tensor(whole.reshape(shape), mesh, [Shard(1)]).view(flat).placements
            for source in (Shard(0), Replicate(), Partial()):
                if source == Partial():
                    x = DTensor.from_local(whole.reshape(flat) * (rank.index + 1), mesh, [source])
                else:
                    x = distribute_tensor(whole.reshape(flat) * 3, mesh, [source])
                found = x.redistribute(mesh, to)
                if not torch.equal(found.full_tensor(), whole.reshape(flat) * 3):
                    wrong.append(f"{source} to {to}: {found.full_tensor().tolist()}")
                if found.to_local().numel() != whole.numel() // rank.size:
                    wrong.append(f"{source} to {to}: has {found.to_local().numel()} elements")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


ALONG: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "sum": lambda x: x.sum(-1),
    "max": lambda x: x.max(-1).values,
    "argmax": lambda x: x.argmax(-1),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(-1).values,
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
    "mse_loss": lambda x: functional.mse_loss(x, x * 2),
}
"""Operators along the last dimension."""


@requirement(
    "TP-FLATTEN-02",
    "An operator along a dimension that a view flattened is that of plain tensors, or raises an error on every rank.",
    source=SOURCE,
)
@SINCE
@pytest.mark.world(2)
def test_along_flattened(world: World) -> None:
    """Flatten the last two dimensions, the inner or outer of which is sharded."""

    def body(rank: Rank) -> tuple[list[str], list[str]]:
        mesh, wrong, refused = rank.mesh(), [], []
        whole = torch.arange(48.0, device=rank.device).reshape(3, 4, 4).sin().double()
        for placement in (Shard(1), Shard(2)):
            for name, operator in ALONG.items():
                try:
                    found = operator(distribute_tensor(whole, mesh, [placement]).view(3, 16)).full_tensor()
                except (RuntimeError, NotImplementedError, ValueError):
                    refused.append(f"{name} of {placement}")
                    continue
                if not torch.allclose(operator(whole.view(3, 16)), found):
                    wrong.append(f"{name} of {placement}: {found.tolist()}")
        return wrong, refused

    results = world.run(body)
    assert_on_ranks([([], results[0][1])] * world.size, results)


Cut = Callable[[Any], Any]
AFTER: dict[str, dict[str, Cut]] = {
    "along": {
        "slice": lambda x: x[:, 2:7],
        "step": lambda x: x[:, 1::3],
        "select": lambda x: x[:, 5],
        "split": lambda x: x.split([5, x.shape[1] - 5], 1)[1],
        "chunk": lambda x: x.chunk(3, -1)[1],
        "narrow": lambda x: x.narrow(-1, 3, 4),
        "slice_scatter": lambda x: torch.slice_scatter(x, x[:, :4] * 0, 1, 2, 6),
        "select_scatter": lambda x: torch.select_scatter(x, x[:, 0] * 0, 1, 5),
        "cat": lambda x: torch.cat([x, x * 2], 1),
        "flip": lambda x: x.flip(1),
        "roll": lambda x: x.roll(2, 1),
        "pad": lambda x: functional.pad(x, (1, 2)),
        "mean": lambda x: x.mean(1),
        "mean of all": lambda x: x.mean(),
        "var": lambda x: x.var(1),
        "topk": lambda x: x.topk(2, 1).values,
        "argsort": lambda x: (x * 16 + x.cumsum(1)).argsort(1),
    },
    "beside": {
        "stack": lambda x: torch.stack([x, x * 2]),
        "stack in the middle": lambda x: torch.stack([x, x * 2], 1),
        "stack at the end": lambda x: torch.stack([x, x * 2], -1),
        "unsqueeze": lambda x: x.unsqueeze(0),
        "unsqueeze in the middle": lambda x: x.unsqueeze(1),
        "unsqueeze at the end": lambda x: x.unsqueeze(-1),
        "squeeze": lambda x: x[:1].squeeze(0),
        "select": lambda x: x[1],
        "select of the last": lambda x: x.select(-2, -1),
        "unbind": lambda x: x.unbind()[2],
        "slice": lambda x: x[1:],
        "split": lambda x: x.split(2)[1],
        "cat": lambda x: torch.cat([x, x * 2]),
        "pad": lambda x: functional.pad(x, (0, 0, 1, 1)),
        "sum": lambda x: x.sum(0),
        "mean": lambda x: x.mean(0),
        "max": lambda x: x.max(0).indices,
        "softmax": lambda x: x.softmax(0),
        "cumsum": lambda x: x.cumsum(0),
    },
    "turned": {
        "t": lambda x: x.t(),
        "T": lambda x: x.T,
        "transpose": lambda x: x.transpose(0, 1),
        "permute": lambda x: x.unsqueeze(0).permute(2, 0, 1),
        "movedim": lambda x: x.movedim(1, 0),
        "turned twice": lambda x: x.t().t(),
        "row of the turned": lambda x: x.t()[:, 1],
        "expand": lambda x: x.expand(2, *x.shape),
        "product": lambda x: x @ x.t(),
        "product with the turned": lambda x: x.t() @ x,
    },
    "again": {
        "back": lambda x: x.view(3, 4, -1),
        "unflatten": lambda x: x.unflatten(1, (4, -1)),
        "unflatten to more": lambda x: x.unflatten(1, (2, 2, -1)),
    },
}
"""Operators on a matrix of three rows, whose columns are flattened from two dimensions, the first of which has four."""


@requirement(
    "TP-FLATTEN-363",
    "A dimension that a view flattened can be cut, stacked, turned or viewed again as a plain one, for any shards.",
    source=f"{SOURCE}; torch.Tensor: view, flatten, unflatten",
)
@requirement(
    "TP-FLATTEN-364",
    "An operator over other dimensions leaves a flattened dimension in shards without communication.",
    source="torch.distributed.tensor.DTensor: issue communications whenever necessary",
)
@pytest.mark.skipif(
    runs_with("<2.13"), reason="before 2.13, operators take the shards of a flattened dimension as plain"
)
@pytest.mark.parametrize("where", AFTER)
@pytest.mark.world(2)
def test_after_flattened(world: World, where: str) -> None:
    """Shard the outer or the inner of two dimensions, evenly or, for the inner one, unevenly, and flatten them."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        for last, placement in ((4, Shard(1)), (4, Shard(2)), (3, Shard(2))):
            whole = floats(3, 4, last).to(rank.device)
            for name, operator in AFTER[where].items():
                case = f"{name} of {placement} of {tuple(whole.shape)}"
                x = distribute_tensor(whole, mesh, [placement]).flatten(1)
                at = messages.launched()
                try:
                    found = operator(x)
                except (RuntimeError, NotImplementedError, ValueError, IndexError) as error:
                    wrong.append(f"{case}: {error!r:.120}")
                    continue
                if where in ("beside", "turned") and "product" not in name and messages.launched() != at:
                    wrong.append(f"{case}: {messages.launched() - at} collectives")
                if not right(operator(whole.flatten(1)), found):
                    wrong.append(f"{case}: {found.placements}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


POSITIONS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Any], Any]]] = {
    "of sequences": ((2, 4, 5), (2, 4), lambda x: x.flatten(0, 1)),
    "of images": ((2, 5, 4, 4), (2, 4, 4), lambda x: x.flatten(-2)),
}
"""The shapes of logits, whose dimension of five is of classes, and of labels, and what flattens positions of both."""


@requirement(
    "TP-FLATTEN-365",
    "A loss of classes over flattened positions is that of plain tensors, and so is its gradient, for any shards.",
    source=f"{SOURCE}; torch.nn.functional: nll_loss, cross_entropy",
)
@pytest.mark.skipif(runs_with("<2.13"), reason="before 2.13, losses take the shards of a flattened dimension as plain")
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.world(2)
def test_losses_of_flattened(world: World, positions: str) -> None:
    """Shard each dimension of positions in turn, before it is flattened."""
    shape, of_labels, flat = POSITIONS[positions]

    def body(rank: Rank) -> list[str]:
        wrong = []
        logits = floats(*shape).to(rank.device)
        labels = torch.arange(torch.Size(of_labels).numel(), device=rank.device).reshape(of_labels) % 5
        classes = shape.index(5)
        for at in range(len(of_labels)):
            placements = [[Shard(at if at < classes else at + 1)], [Shard(at)]]
            for loss in (functional.nll_loss, functional.cross_entropy):
                for reduction in ("none", "sum", "mean"):
                    plain = logits.clone().requires_grad_()
                    expected = loss(flat(plain), flat(labels), reduction=reduction)
                    expected.sum().backward()
                    own = distribute_tensor(logits, rank.mesh(), placements[0]).requires_grad_()
                    given: Any = distribute_tensor(labels, rank.mesh(), placements[1])
                    case = f"{loss.__name__} ({reduction}) of {placements[0][0]}"
                    try:
                        found: Any = loss(flat(own), flat(given), reduction=reduction)
                        found.sum().backward()
                    except (RuntimeError, NotImplementedError, ValueError, IndexError) as error:
                        wrong.append(f"{case}: {error!r:.120}")
                        continue
                    if not right(expected, found):
                        wrong.append(f"{case}: {found.placements}")
                    if not right(plain.grad, own.grad):
                        wrong.append(f"{case}: its gradient")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))


@requirement(
    "TP-FLATTEN-03",
    "argmax and argmin of all elements of a DTensor are those of the plain tensor, for any placements.",
    source=f"{SOURCE}; torch.argmax, argmin",
)
@SINCE
@pytest.mark.parametrize("shape", [(4, 2), (1, 3)], ids=["all ranks have some", "a rank has none"])
@pytest.mark.world(2)
def test_extremes_of_all(world: World, shape: tuple[int, int]) -> None:
    """The extreme element is in each place in turn."""

    def body(rank: Rank) -> list[str]:
        mesh, wrong = rank.mesh(), []
        count = torch.Size(shape).numel()
        for at in range(count):
            whole = torch.arange(float(count), device=rank.device).roll(at).reshape(shape)
            for placement in (Shard(0), Shard(1), Replicate()):
                x = distribute_tensor(whole, mesh, [placement])
                for name in ("argmax", "argmin"):
                    found = getattr(x, name)()
                    found = found.full_tensor() if isinstance(found, DTensor) else found
                    right = getattr(whole, name)()
                    if found.dtype != right.dtype or found.shape != right.shape or not torch.equal(found, right):
                        wrong.append(f"{name} of {placement}, {at}: {found.tolist()} and not {right.tolist()}")
        return wrong

    assert_on_ranks([[]] * world.size, world.run(body))
