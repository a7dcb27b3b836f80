"""Each law holds on healthy ranks, and does not on ranks that break it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from harness import Rank
from harness.programs import execute, reproducer
from harness.programs.laws import LAWS, holds
from harness.programs.options import takes
from harness.programs.problem import Different
from harness.programs.stored import loads
from harness.programs.strategies import programs
from harness.reproducers import carried
from harness.specs.program import (
    Activation,
    Branch,
    Compile,
    Container,
    Layer,
    Layout,
    Linear,
    Model,
    Norm,
    Optimizer,
    Program,
    Residual,
    Step,
)
from harness.stacks import registry
from harness.stacks import replicate as ddp
from harness.stacks import replicate_fsdp as fsdp
from harness.stacks.tp_extension import training as tp
from tests.programs.damaged import Damaged, unreduced

MODEL = Model((3,), (Linear(4), Linear(2)))
ROUNDED = Model((3,), (Linear(4), Norm(), Activation("tanh"), Linear(2)))
PLAIN = Program(MODEL, steps=(Step(rows=(4,), reload=True),), optimizer=Optimizer(momentum=0.5))
WRAPPED = Program(MODEL, Layout("replicate_fsdp", wrapped=("linear0",)), PLAIN.steps, PLAIN.optimizer)


def healthy(rank: Rank) -> None:
    """Nothing."""


def last_micro_batch_only(rank: Rank) -> None:
    """Gradients are forgotten before each backward."""
    plain = torch.Tensor.__dict__.get("_undamaged", torch.Tensor.backward)

    def backward(self: torch.Tensor, *args: Any, **options: Any) -> None:
        for tensor in _parameters:
            tensor.grad = None
        plain(self, *args, **options)

    _parameters: list[torch.Tensor] = []
    torch.Tensor.backward, torch.Tensor._undamaged = backward, plain  # type: ignore[method-assign,attr-defined]
    made = ddp.replicate

    def replicate(model: torch.nn.Module, **options: Any) -> Any:
        _parameters.extend(model.parameters())
        return made(model, **options)

    ddp.replicate = replicate  # type: ignore[assignment]


def loads_nothing(rank: Rank) -> None:
    """Optimizers forget what they are given."""
    torch.optim.Optimizer.load_state_dict = lambda self, state_dict: None  # type: ignore[method-assign,assignment]


def wrapped_layers_stand_still(rank: Rank) -> None:
    """What is wrapped on its own is not trained."""
    plain = fsdp.replicate

    @functools.wraps(plain)  # its signature is looked at
    def replicate(module: torch.nn.Module, **options: Any) -> Any:
        if isinstance(module, torch.nn.Linear):
            module.requires_grad_(False)
        return plain(module, **options)

    fsdp.replicate = replicate  # type: ignore[assignment]


def first_wrapped_stands_still(rank: Rank) -> None:
    """What is wrapped before all others is not trained."""
    plain, before = fsdp.replicate, []

    @functools.wraps(plain)
    def replicate(module: torch.nn.Module, **options: Any) -> Any:
        if not isinstance(module, torch.nn.Linear):
            before.clear()  # the whole model, which is the last
        elif not before:
            before.append(module)
            module.requires_grad_(False)
        return plain(module, **options)

    fsdp.replicate = replicate  # type: ignore[assignment]


def divided_layers_are_others(rank: Rank) -> None:
    """Tensor-parallel layers do not keep their parameters."""
    plain = tp.parallelize_module

    def parallelize(model: torch.nn.Module, mesh: Any, styles: Any) -> Any:
        for name in styles:
            torch.nn.init.ones_(model.get_submodule(name).weight)  # type: ignore[arg-type]
        return plain(model, mesh, styles)

    tp.parallelize_module = parallelize


def rows_only(rank: Rank) -> None:
    """Of a mesh that is flattened, only a row is left."""

    def line_mesh(party: Any, shape: str) -> Any:
        sizes = tuple(int(size) for size in shape.split("x"))
        return execute.training.init_device_mesh("cpu", sizes, mesh_dim_names=("rows", "columns"))["columns"]

    ddp.line_mesh = fsdp.line_mesh = line_mesh


def compiled_wrong(rank: Rank) -> None:
    """What is compiled gives twice its output."""
    plain = execute.training.lookup_backend

    def lookup(name: str) -> Any:
        def backend(graph: Any, inputs: Any, **options: Any) -> Any:
            made = plain(name)(graph, inputs, **options)
            return lambda *args: tuple(2 * t if t.requires_grad else t for t in made(*args))

        return backend

    execute.training.lookup_backend = lookup


def one_ulp(rank: Rank) -> None:
    """Gradients on ranks are the next larger numbers."""
    plain = ddp.replicate

    def replicate(model: torch.nn.Module, **options: Any) -> Any:
        for parameter in model.parameters():
            parameter.register_hook(lambda g: torch.nextafter(g, torch.full_like(g, torch.inf)))
        return plain(model, **options)

    ddp.replicate = replicate  # type: ignore[assignment]


def replicas_alone(rank: Rank) -> None:
    """Nothing is summed but what is scattered."""
    torch.distributed.all_reduce = lambda *args, **options: None


_UNSAVED = (Step(rows=(4,)),) * 2
_FLAT = (("use_orig_params", False),)

DAMAGES: dict[str, tuple[Callable[[Rank], None], Program]] = {
    "permuted": (unreduced, PLAIN),
    "spread": (unreduced, PLAIN),
    "accumulated": (last_micro_batch_only, PLAIN),
    "unwrapped": (wrapped_layers_stand_still, WRAPPED),
    "rewrapped": (
        first_wrapped_stands_still,
        Program(MODEL, Layout("replicate_fsdp", wrapped=("linear0", "linear1")), _UNSAVED, PLAIN.optimizer),
    ),
    "undivided": (
        divided_layers_are_others,
        Program(MODEL, Layout("tp_extension", 4, 2, plan=(("linear0", "columns"),), options=_FLAT), _UNSAVED),
    ),
    "flattened": (rows_only, PLAIN),
    "never-saved": (loads_nothing, Program(MODEL, steps=PLAIN.steps * 2, optimizer=PLAIN.optimizer)),
    "resumed": (loads_nothing, Program(MODEL, steps=_UNSAVED, optimizer=PLAIN.optimizer)),
    "eager": (
        compiled_wrong,
        Program(MODEL, Layout("dynamo", options=(("inner", "replicate"),), compiled=Compile()), _UNSAVED),
    ),
    "single": (one_ulp, Program(ROUNDED, steps=_UNSAVED, dtype="float32", span=0, denominator=1)),
}


LONG = ("permuted", "spread", "unwrapped")
"""Cases that take longest, for the nightly job."""
CASES = {
    **{law: (law, *case) for law, case in DAMAGES.items()},
    "hybrid": ("flattened", replicas_alone, Program(MODEL, Layout("tp_extension", options=_FLAT), _UNSAVED)),
}


@pytest.fixture(scope="module")
def sound() -> Iterator[Damaged]:
    with Damaged(healthy) as worlds:
        yield worlds


def test_every_law_is_seen_to_fail() -> None:
    """No law is without a damage."""
    assert DAMAGES.keys() == LAWS.keys()


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.nightly] * (case in LONG)) for case in CASES])
def test_law(case: str, sound: Damaged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quiet on healthy ranks; of damaged ones it says which law is broken, by which number; programs are written."""
    monkeypatch.setenv(reproducer.FOLDER, str(tmp_path))
    law, damage, program = CASES[case]
    assert holds(sound, program, law)
    assert list(tmp_path.iterdir()) == []
    said = pytest.raises(Different, match=f"the law '{law}' does not hold\n")
    with Damaged(damage) as worlds, said as caught:
        holds(worlds, program, law)
    assert caught.value.law == law
    assert {problem.kind for problem in caught.value.problems} == {"values"}
    pair = LAWS[law].runs(program)
    assert pair is not None
    written = sorted(tmp_path.glob("*.json"))
    assert {loads(file.read_text()) for file in written} == set(pair)
    assert all(file.with_suffix(".py").exists() for file in written)
    assert [each.file for each in carried(caught.value)] == [file.with_suffix(".py") for file in written]
    assert all(str(file.with_suffix(".py")) in "\n".join(caught.value.__notes__) for file in written)


def test_hybrid_shards() -> None:
    """Of FSDP1 the flattened mesh is compared with replicas of shards."""
    made = LAWS["flattened"].runs(Program(MODEL, Layout("tp_extension", options=_FLAT), _UNSAVED))
    assert made is not None
    assert [dict(p.layout.options).get("strategy") for p in made] == ["FULL_SHARD", "HYBRID_SHARD"]


def test_alone_is_where_torch_alone_would_be() -> None:
    """What is compared with torch alone, whatever rounds, lies at multiples of 16 bytes, as it does there."""
    made = LAWS["single"].runs(Program(MODEL, Layout("tp_extension", options=_FLAT), _UNSAVED))
    assert made is not None
    assert [dict(p.layout.options)["use_orig_params"] for p in made] == [True, True]


@pytest.mark.parametrize(
    ("inner", "wrapped", "applies"),
    [
        (Norm("rms"), "residual1.0", False),
        (Norm("rms"), "residual1", True),
        (Norm("layer"), "residual1.0", True),
        (Residual((Linear(2),)), "residual1.0", False),
        (Container("sequential", (Norm("rms"), Linear(2))), "residual1.0", False),
        (Container("sequential", (Norm("rms"), Linear(2))), "residual1.0.0", False),
        (Container("sequential", (Linear(2), Norm("rms"))), "residual1.0.1", True),
    ],
)
def test_alone_adds_up_in_the_same_order(inner: Layer, wrapped: str, applies: bool) -> None:
    """FSDP2 adds up gradients of a wrapped module's input apart, which rounds differently if others use it, too."""
    model = Model((2,), (Linear(2), Residual((inner,)), Linear(2)))
    program = Program(model, Layout("replicate_fsdp", wrapped=(wrapped, "linear0")), _UNSAVED, dtype="float32")
    assert (LAWS["single"].runs(program) is not None) == applies


@pytest.mark.parametrize(
    ("law", "program"),
    [
        ("permuted", Program(MODEL, Layout(world=1))),
        ("spread", Program(MODEL, same_data=True)),
        ("accumulated", Program(Model((3,), (Branch(Linear(3)),)))),
        ("unwrapped", Program(MODEL)),
        ("rewrapped", WRAPPED),
        ("undivided", Program(MODEL)),
        ("never-saved", Program(MODEL)),
        ("resumed", Program(MODEL, Layout("tp_extension", 2, 2))),
        ("eager", Program(MODEL)),
        ("permuted", Program(ROUNDED, dtype="float32", span=0, denominator=1)),
    ],
)
def test_nothing_to_say(law: str, program: Program, sound: Damaged) -> None:
    """Where a law makes no other program, or numbers are rounded in another order, nothing is executed."""
    assert not holds(sound, program, law)


@pytest.mark.parametrize("stack", registry.own_names())
def test_what_is_drawn_is_taken(stack: str) -> None:
    """Laws keep to the limits of drawn layouts, and those limits take whatever is drawn."""

    @settings(max_examples=300, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(programs(stack, (1, 2, 3, 4)))
    def check(program: Program) -> None:
        assert takes(program)

    check()


def test_what_is_not_drawn_is_not_taken() -> None:
    """Original parameters over tensor-parallel layers, accumulating without synchronization: tp_no_sync.py."""
    layout = Layout("tp_extension", 4, 2, plan=(("linear0", "columns"),))
    for rows, expected in (((4,), True), ((4, 4), False)):
        assert takes(Program(MODEL, layout, (Step(rows=rows),), dtype="float32")) == expected


@pytest.mark.parametrize("style", ["columns", "rows"])
def test_one_number_is_not_taken(style: str) -> None:
    """A flat parameter of one element, shared out either way, whose gradients add up: tp_one_element.py."""
    model = Model((1,), (Linear(2, bias=False),)) if style == "columns" else Model((2,), (Linear(1, bias=False),))
    options = (("use_orig_params", False), ("strategy", "FULL_SHARD"))
    layout = Layout("tp_extension", 4, 2, plan=(("linear0", style),), options=options)
    for zero, expected in (("none", True), ("keep", False)):
        steps = (Step(rows=(2,), zero=zero), Step(rows=(2,)))
        assert takes(Program(model, layout, steps, dtype="float32")) == expected
