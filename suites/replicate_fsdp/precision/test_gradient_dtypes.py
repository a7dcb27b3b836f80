"""The dtypes that gradients are reduced and kept in: grad_dtype, and dtypes of single parameters. Since PyTorch 2.15.

Ranks have 512 and 2, whose average, 257, needs nine bits, and bfloat16 has eight.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate_fsdp

SOURCE = "torch.distributed.fsdp.MixedPrecisionPolicy: reduce_dtype"
NARROW = torch.bfloat16
OF_2_15 = pytest.mark.needs(torch="torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype_override_fn)")
VALUES = (512.0, 2.0)
EXACT, ROUNDED = ("float32", 257.0), ("bfloat16", 256.0)
Gradients = tuple[tuple[str, float] | None, ...]


class Product(nn.Module):
    """Two parameters of different sizes, each of which an input may use."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, dtype=dtype)), nn.Parameter(torch.ones(3, dtype=dtype))
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: torch.Tensor, used: str = "ab") -> torch.Tensor:
        self.seen.append((self.a.dtype, self.b.dtype, x.dtype))
        return sum(((getattr(self, name) * x).sum() for name in used), torch.zeros((), dtype=x.dtype, device=x.device))


def _backward(model: nn.Module, value: float, rank: Rank, *used: str) -> None:
    model(torch.tensor(value, dtype=next(model.parameters()).dtype, device=rank.device), *used).backward()


def _read(model: nn.Module) -> Gradients:
    """Return dtype and value of each gradient, whose elements are all equal."""
    gradients = replicate_fsdp.gradients(model)
    for gradient in gradients.values():
        assert (gradient == gradient[0]).all()
    return tuple(
        (str(gradients[name].dtype)[6:], float(gradients[name][0])) if name in gradients else None for name in "ab"
    )


@requirement(
    "RFSDP-GRADTYPE-01",
    "Without a reduce_dtype, gradients are reduced in the dtype of the parameters, whatever they are computed in.",
    source=SOURCE,
)
@OF_2_15
@pytest.mark.world(2)
def test_reduced_in_own_dtype(world: World) -> None:
    """Compute in bfloat16; the second step comes after gradients were cleared."""

    def body(rank: Rank) -> list[Gradients]:
        model, seen = replicate_fsdp.apply(Product(), rank, mp_policy=MixedPrecisionPolicy(NARROW)), []
        for _ in range(2):
            _backward(model, VALUES[rank.index], rank)
            seen.append(_read(model))
            model.zero_grad()
        return seen

    assert_on_ranks([[(EXACT, EXACT)] * 2] * 2, world.run(body))


@requirement(
    "RFSDP-GRADTYPE-02",
    "Without a reduce_dtype, gradients of micro-batches accumulate in the parameter's dtype, even if one of them does "
    "not use the parameter.",
    source=SOURCE,
)
@OF_2_15
@pytest.mark.parametrize("delayed", ["reduction", "all-reduce"])
@pytest.mark.world(1, 2)
def test_accumulated_in_own_dtype(world: World, delayed: str) -> None:
    """Run two steps with micro-batches of 256, 1 and 1: the second one uses only the second parameter."""

    def body(rank: Rank) -> list[Gradients]:
        model: Any = replicate_fsdp.apply(Product(), rank, mp_policy=MixedPrecisionPolicy(NARROW))
        switch = model.set_requires_gradient_sync if delayed == "reduction" else model.set_requires_all_reduce
        seen = []
        for _ in range(2):
            for value, used, last in ((256.0, "a", False), (1.0, "b", False), (1.0, "a", True)):
                switch(last)
                _backward(model, value, rank, used)
            seen.append(_read(model))
            model.zero_grad()
        return seen

    assert_on_ranks([[(("float32", 257.0), ("float32", 1.0))] * 2] * world.size, world.run(body))


@requirement(
    "RFSDP-GRADTYPE-03",
    "Each gradient has its parameter's grad_dtype, whatever other parameters of the communication group have.",
    source=SOURCE,
)
@OF_2_15
@pytest.mark.parametrize("param", [torch.float32, NARROW], ids=["float32", "bfloat16"])
@pytest.mark.world(2)
def test_own_dtype(world: World, param: torch.dtype) -> None:
    """The first parameter's gradients are bfloat16, those of the second float32; two backwards add up."""

    def body(rank: Rank) -> list[Gradients]:
        module = Product(param)
        module.a.grad_dtype, module.b.grad_dtype = NARROW, torch.float32  # type: ignore[attr-defined]
        model, seen = replicate_fsdp.apply(module, rank), []
        for _ in range(2):
            _backward(model, VALUES[rank.index], rank)
            seen.append(_read(model))
        return seen

    assert_on_ranks([[(ROUNDED, EXACT), (("bfloat16", 512.0), ("float32", 514.0))]] * 2, world.run(body))


@requirement(
    "RFSDP-GRADTYPE-04",
    "With grad_dtype None, gradients keep the dtype that they were computed in.",
    source=SOURCE,
)
@OF_2_15
@pytest.mark.world(2)
def test_any_dtype(world: World) -> None:
    """Compute in bfloat16."""

    def body(rank: Rank) -> Gradients:
        module = Product()
        module.a.grad_dtype = module.b.grad_dtype = None  # type: ignore[attr-defined]
        model = replicate_fsdp.apply(module, rank, mp_policy=MixedPrecisionPolicy(NARROW))
        _backward(model, VALUES[rank.index], rank)
        return _read(model)

    assert_on_ranks([(ROUNDED, ROUNDED)] * 2, world.run(body))


@requirement(
    "RFSDP-GRADTYPE-05",
    "A parameter keeps its grad_dtype when it is converted, or assigned by load_state_dict.",
    source="torch.distributed.fsdp.fully_shard: grad_dtype",
)
@OF_2_15
@pytest.mark.parametrize("changed", ["converted", "assigned"])
@pytest.mark.world(2)
def test_kept(world: World, changed: str) -> None:
    """Change the parameters before the first forward."""

    def body(rank: Rank) -> Gradients:
        module = Product()
        module.a.grad_dtype = NARROW  # type: ignore[attr-defined]
        model = replicate_fsdp.apply(module, rank)
        if changed == "converted":
            model.to(torch.float64)
        else:
            state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        _backward(model, VALUES[rank.index], rank)
        return _read(model)

    other = ("float64" if changed == "converted" else "float32", 257.0)
    assert_on_ranks([(ROUNDED, other)] * 2, world.run(body))


@requirement(
    "RFSDP-GRADTYPE-06",
    "Reducing unused parameters raises an error on every rank if a grad_dtype is None and there is no reduce_dtype.",
    source="torch.distributed.fsdp.FSDPModule: set_reduce_scatter_unused_params",
)
@OF_2_15
@pytest.mark.world(2)
def test_unknown_dtype(world: World) -> None:
    """After reset_iter_state, and without reducing unused parameters, the next step is right."""

    def body(rank: Rank) -> Gradients:
        module = Product()
        module.a.grad_dtype = None  # type: ignore[attr-defined]
        model: Any = replicate_fsdp.apply(module, rank)
        model.set_reduce_scatter_unused_params(True)
        with pytest.raises(ValueError, match="grad_dtype=None"):
            _backward(model, 1.0, rank, "ab"[rank.index])
        model.reset_iter_state()
        model.set_reduce_scatter_unused_params(False)
        _backward(model, VALUES[rank.index], rank)
        return _read(model)

    assert_on_ranks([(EXACT, EXACT)] * 2, world.run(body))


@requirement(
    "RFSDP-OVERRIDE-01",
    "A parameter is not cast if param_dtype_override_fn, which is called once for it, returns its own dtype.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: param_dtype_override_fn",
)
@requirement(
    "RFSDP-OVERRIDE-02",
    "With param_dtype_override_fn, gradients equal those of one device, and inputs are still cast to param_dtype.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: param_dtype_override_fn",
)
@OF_2_15
@pytest.mark.world(1, 2)
def test_overridden(world: World) -> None:
    """The first parameter stays float32; run two steps."""

    def body(rank: Rank) -> Any:
        asked: list[tuple[int, ...]] = []

        def keep(parameter: nn.Parameter) -> torch.dtype | None:
            asked.append(tuple(parameter.shape))
            return parameter.dtype if len(parameter) == 2 else None

        options: Any = {"param_dtype_override_fn": keep}
        module = Product()
        model, seen = replicate_fsdp.apply(module, rank, mp_policy=MixedPrecisionPolicy(NARROW, **options)), []
        for _ in range(2):
            _backward(model, VALUES[rank.index], rank)
            seen.append(_read(model))
            model.zero_grad()
        assert module.seen == [(torch.float32, NARROW, NARROW)] * 2
        return sorted(asked), seen

    value = ("float32", sum(VALUES[: world.size]) / world.size)
    assert_on_ranks([([(2,), (3,)], [(value, value)] * 2)] * world.size, world.run(body))


@requirement(
    "RFSDP-OVERRIDE-03",
    "replicate raises ValueError if param_dtype_override_fn returns anything but None, param_dtype or the parameter's "
    "dtype.",
    source="torch.distributed.fsdp.MixedPrecisionPolicy: param_dtype_override_fn",
)
@OF_2_15
@pytest.mark.parametrize("returned", [torch.float16, torch.float64, "float32", 0], ids=str)
@pytest.mark.world(2)
def test_refused(world: World, returned: Any) -> None:
    """The error comes from replicate, on every rank."""

    def body(rank: Rank) -> None:
        options: Any = {"param_dtype_override_fn": lambda parameter: returned}
        with pytest.raises(ValueError, match="param_dtype_override_fn"):
            replicate_fsdp.apply(Product(), rank, mp_policy=MixedPrecisionPolicy(NARROW, **options))

    world.run(body)
