"""Programs are data: they survive JSON, refuse garbage, and know the shapes of their layers."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.programs.execute import alone, functions
from harness.programs.source import source
from harness.programs.stored import dumps, loads
from harness.programs.strategies import programs
from harness.specs.program import (
    Activation,
    Attention,
    Branch,
    Container,
    Conv,
    Embedding,
    Layer,
    Layout,
    Linear,
    Model,
    Norm,
    Program,
    Residual,
    Tied,
)
from harness.specs.shapes import walk
from harness.stacks.registry import own_names
from harness.stacks.training import Party

PLAIN = Program(Model((3,), (Linear(4), Residual((Linear(4), Activation())))))


@pytest.mark.parametrize("stack", own_names())
def test_json_and_back(stack: str) -> None:
    """Any program that is drawn is the same after JSON, compares by value, and can't be changed."""

    @settings(max_examples=15, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(programs(stack))
    def check(program: Program) -> None:
        again = loads(dumps(program))
        assert again == program
        assert hash(again) == hash(program)
        assert source(again) == source(program)

    check()
    with pytest.raises(AttributeError):
        PLAIN.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("stack", own_names())
def test_drawn_programs_train_alone(stack: str) -> None:
    """What is drawn runs on one device, twice with the same bits."""

    @settings(max_examples=10, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(programs(stack))
    def check(program: Program) -> None:
        first, second = alone(program)(), alone(program)()
        assert list(first) == list(second)
        assert all(first[name].equal(second[name]) for name in first)
        assert any("gradient of" in name for name in first)

    check()


RELU = {"type": "Activation"}


@settings(deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200))
def test_garbage(data: bytes | str) -> None:
    """What is no program gets one error that says so."""
    with pytest.raises(ValueError, match="this is no program"):
        loads(data)


def test_endless_nesting() -> None:
    """So does what is nested deeper than anybody can read."""
    layers = '{"type": "Twice", "body": ' * 100_000 + json.dumps(RELU) + "}" * 100_000
    with pytest.raises(ValueError, match="this is no program"):
        loads('{"version": 1, "program": {"model": {"inputs": [3], "layers": [' + layers + "]}}}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"program": {"model": {"inputs": [3], "layers": [{"type": "Cube"}]}}}, "Invalid value 'Cube' - at "),
        ({"program": {"model": {"inputs": [3], "layers": [RELU]}, "sed": 1}}, "unknown field `sed`"),
        ({"program": {"model": {"inputs": ["x"], "layers": [RELU]}}}, r"\$.program.model.inputs\[0\]"),
        ({"version": 99}, "a program of version 99"),
    ],
)
def test_mistakes_are_named(change: dict[str, object], message: str) -> None:
    """An error names the place."""
    with pytest.raises(ValueError, match=message):
        loads(json.dumps({**json.loads(dumps(PLAIN)), **change}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": {"inputs": [3], "layers": []}}, r"length >= 1 - at `\$.program.model.layers`"),
        ({"model": {"inputs": [-3], "layers": [RELU]}}, r">= 0 - at `\$.program.model.inputs"),
        ({"model": {"inputs": [3], "layers": [RELU], "tokens": -1}}, r">= 0 - at `\$.program.model.tokens`"),
        ({"model": {"inputs": [3], "layers": [{"type": "Linear", "out": -1}]}}, ">= 0 - at "),
        ({"model": {"inputs": [3], "layers": [{**RELU, "kind": "cube"}]}}, "matching regex .*relu"),
        ({"layout": {"world": 1_000_000}}, r"<= 64 - at `\$.program.layout.world`"),
        ({"layout": {"world": 0}}, r">= 1 - at `\$.program.layout.world`"),
        ({"layout": {"stack": "nonsense"}}, "no stack 'nonsense'; there are replicate, replicate_fsdp, tp_ext"),
        ({"layout": {"stack": "dynamo", "options": [["inner", "nonsense"]]}}, "no stack 'nonsense' to compile"),
        ({"layout": {"tensor": 3}}, "2 ranks can't be divided into groups of 3"),
        ({"layout": {"wrapped": ["nothing.here"]}}, "no layer 'nothing.here' among linear0"),
        ({"layout": {"plan": [["linear9", "rows"]]}}, "no layer 'linear9'"),
        ({"steps": [{"toggle": "linear9"}]}, "no layer 'linear9'"),
        ({"steps": []}, r"length >= 1 - at `\$.program.steps`"),
        ({"steps": [{"rows": [-1]}]}, ">= 0 - at "),
        ({"optimizer": {"kind": "adagrad"}}, "matching regex .*adamw"),
        ({"dtype": "float64\n"}, "matching regex .*bfloat16"),
        ({"dtype": "complex64"}, "matching regex .*bfloat16"),
        ({"denominator": 0}, r">= 1 - at `\$.program.denominator`"),
        ({"span": -1}, r">= 0 - at `\$.program.span`"),
    ],
)
def test_senseless_values_are_named(changed: dict[str, object], message: str) -> None:
    """What is of no kind that there is, or of no size that can be, is no program."""
    plain = json.loads(dumps(Program(Model((3,), (Linear(4),)))))
    with pytest.raises(ValueError, match=message):
        loads(json.dumps({**plain, "program": {**plain["program"], **changed}}))


@pytest.mark.parametrize(
    "model",
    [
        Model((5,), (Linear(7), Linear(2))),
        Model((3, 4), (Conv(2, 2), Linear(3))),
        Model((2,), (Embedding(3), Linear(0)), tokens=5),
    ],
    ids=["linear", "convolution", "embedding"],
)
def test_sparse_weights(model: Model) -> None:
    """Each row of a weight has one number, the next row's is in the next column, and biases are full."""
    built = functions(Program(model, sparse=True))["build"](Party())
    for parameter in built.parameters():
        if parameter.dim() == 1:
            assert parameter.all()
        elif parameter.numel():
            columns = parameter.flatten(1).shape[1]
            assert [row.nonzero().tolist() for row in parameter.flatten(1)] == [
                [[row % columns]] for row in range(len(parameter))
            ]


@pytest.mark.parametrize(
    ("layout", "both"),
    [
        (Layout("tp_extension", world=4, tensor=2, plan=(("linear0", "columns"),)), True),
        (Layout("tp_extension", world=4, tensor=2), False),
        (Layout("tp_extension", world=4, tensor=4, plan=(("linear0", "columns"),)), False),
        (Layout("tp_extension", world=4, plan=(("linear0", "columns"),)), False),
    ],
)
def test_two_dimensional(layout: Layout, both: bool) -> None:
    """Some ranks share a layer, and others the batch."""
    assert layout.two_dimensional == both


def test_names_and_shapes() -> None:
    """Layers have the names that get_submodule takes, and shapes by hand."""
    layers: tuple[Layer, ...] = (
        Embedding(4),
        Attention(2),
        Conv(5, 2),
        Container("list", (Linear(6), Norm())),
        Branch(Linear(6), "odd"),
        Tied("branch4.0"),
    )
    found = {n.name: (n.before, n.after) for n in walk(Model((3,), layers, tokens=9))}
    assert found == {
        "embedding0": ((3,), (3, 4)),
        "attention1": ((3, 4), (3, 4)),
        "conv2": ((3, 4), (5, 3)),
        "container3": ((5, 3), (5, 6)),
        "container3.0": ((5, 3), (5, 6)),
        "container3.1": ((5, 6), (5, 6)),
        "branch4": ((5, 6), (5, 6)),
        "branch4.0": ((5, 6), (5, 6)),
        "tied5": ((5, 6), (5, 6)),
    }


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model((3,), (Linear(3), Embedding(3)), tokens=4), "begins with an embedding"),
        (Model((3,), (Embedding(3),)), "an embedding is the first layer"),
        (Model((3,), (Residual((Linear(4),)),)), "the body of residual"),
        (Model((3,), (Conv(2),)), "no convolution"),
        (Model((3, 3), (Attention(2),)), "no attention with 2 heads"),
        (Model((3,), (Linear(4), Tied("linear0"))), "no weight for 4 features"),
        (Model((3,), (Tied("linear9"),)), "no weight for 3 features"),
        (Model((3, 3, 3), (Norm("batch"),)), "no batch norm"),
        (Model((), (Linear(3),)), "no dimension"),
    ],
)
def test_what_can_not_stand_there(model: Model, message: str) -> None:
    """A layer that can't stand where it is is refused, with the reason."""
    with pytest.raises(ValueError, match=message):
        source(Program(model))
