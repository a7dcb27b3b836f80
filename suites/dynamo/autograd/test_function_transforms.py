"""Function transforms of torch.func over functional collectives, compiled and uncompiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness import Rank, World, assert_same, requirement
from harness.stacks.collectives import functional, unwaited
from harness.stacks.limit import runs_with
from suites.dynamo.collectives.test_functional_arguments import BACKENDS, run_by

Collective = Callable[[Tensor], Tensor]
Transformed = Callable[[Collective, Tensor], Tensor]

COLLECTIVES: dict[str, Collective] = {"all_reduce": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD)}
if not runs_with("<2.13"):  # before 2.13, transforms refuse the others, as they say
    COLLECTIVES |= {
        "all_gather": lambda x: functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD),
        "reduce_scatter": lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD),
        "all_to_all": lambda x: functional.all_to_all_single_autograd(x, [1, 1], [1, 1], dist.group.WORLD),
    }
"""Linear functions of a tensor of two elements, of which each has a gradient."""


def _rows(x: Tensor) -> Tensor:
    return torch.stack([x, x + 1, x * 2])


def _gradient(f: Collective, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((f(leaf) * 3).sum(), leaf)
    return gradient


TRANSFORMS: dict[str, tuple[Transformed, Transformed]] = {
    "vmap": (
        lambda f, x: torch.vmap(lambda row: f(row) + 0)(_rows(x)),
        lambda f, x: torch.stack([f(row) + 0 for row in _rows(x)]),
    ),
    "vmap of another": (
        lambda f, x: torch.vmap(lambda row: f(x).sum() * row)(_rows(x)),
        lambda f, x: f(x).sum() * _rows(x),
    ),
    "jvp": (
        lambda f, x: torch.func.jvp(lambda y: f(y) * 3, (x,), (x + 1,))[1],
        lambda f, x: f(x + 1) * 3,
    ),
    "jvp of another": (
        lambda f, x: torch.func.jvp(lambda y: f(x) * y, (x[:1],), (x[1:],))[1],
        lambda f, x: f(x) * x[1:],
    ),
    "grad": (
        lambda f, x: torch.func.grad(lambda y: (f(y) * 3).sum())(x),
        _gradient,
    ),
    "grad of another": (
        lambda f, x: torch.func.grad(lambda y: (f(x) * y).sum())(x[0]),
        lambda f, x: (f(x) + 0).sum(),
    ),
}
"""What a function transform makes of a collective, or of what is multiplied with its result, and the same without."""


@requirement(
    "DYN-TRANSFORM-6101",
    "Function transforms of functional collectives give what the collectives of rows, directions or losses give.",
    source="torch.vmap; torch.func.jvp; torch.func.grad; torch/distributed/_functional_collectives.py",
)
@pytest.mark.parametrize("name", [*TRANSFORMS])
@pytest.mark.needs(collective="all_to_all_single")
@pytest.mark.world(2)
def test_transforms(world: World, name: str) -> None:
    """Transform each collective, uncompiled and compiled as one graph, and look whether anything is pending then."""
    transformed, plain = TRANSFORMS[name]

    def call(x: Tensor) -> list[Tensor]:
        return [transformed(f, x) + 0 for f in COLLECTIVES.values()]

    def body(rank: Rank) -> None:
        x = torch.tensor([1.0, 4.0], device=rank.device) + 16 * rank.index
        rights = [plain(f, x) + 0 for f in COLLECTIVES.values()]
        for backend in BACKENDS:
            pending = unwaited()
            results = run_by(backend, call)(x)
            how = backend or "uncompiled"
            assert unwaited() == pending, f"{how}: nothing has waited for {unwaited() - pending} collectives"
            for what, right, result in zip(COLLECTIVES, rights, results, strict=True):
                assert_same(right, result, f"{what}, {how}")

    world.run(body)
