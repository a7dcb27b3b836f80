"""What somebody might put into a stored program, at every place that there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from harness.specs.program import (
    Activation,
    Attention,
    Branch,
    Checkpointed,
    Compile,
    Container,
    Conv,
    Embedding,
    Hooked,
    Layer,
    Layout,
    Linear,
    Mask,
    Model,
    Norm,
    Optimizer,
    Program,
    Residual,
    Scale,
    Step,
    Tied,
    Twice,
)

CANARY = "concord_was_here"
"""An attribute of builtins that payloads set."""
PAYLOADS = (
    f"x=__import__('builtins').__setattr__('{CANARY}', 1), y",
    f"');__import__('builtins').__setattr__('{CANARY}', 1)#",
    f'")\n__import__("builtins").__setattr__("{CANARY}", 1)\n#',
    f"{{__import__('builtins').__setattr__('{CANARY}', 1)}}",
    f"linear0'.__class__ if __import__('builtins').__setattr__('{CANARY}', 1) else '",
    "\x1b[31m\u202e\r\x07\ud800",
    "linear0\n",
    "__class__",
    "linéar0",
    "x" * 100_000,
)
"""Strings that run something, drive a terminal, or are none of a program's words."""

_LAYERS: tuple[Layer, ...] = (
    Embedding(4),
    Linear(4, bias=False),
    Residual((Linear(4), Activation("abs"))),
    Container("dict", (Linear(4), Norm("layer"))),
    Twice(Linear(4)),
    Branch(Linear(4), "odd"),
    Hooked(Linear(4), "saved"),
    Checkpointed(Linear(4)),
    Scale("rebound"),
    Mask(),
    Attention(2),
    Conv(4, 2),
    Tied("linear1", alias=True),
)
_MODEL = Model((4,), _LAYERS[:11], tokens=5)
_OWN_DTYPE = Model((4, 4), (Linear(4, dtype="float64"), Norm("rms", dtype="float64"), Conv(4, 2), Linear(4)))
_TIED = Model((4,), (Linear(4), Tied("linear0", alias=True), Linear(4, frozen=True)))
_STEPS = (
    Step((4, 6), True, (True,), "zero", 1.0, True, "linear0", True),
    Step((2,), zero="keep", clip_values=0.25, abandoned="layer", averaged=True),
)
_ADAMW = Optimizer("adamw", 0.01, 0.5, 0.1, decay=0.5, form="fused")

PROGRAMS: dict[str, Program] = {
    "replicate": Program(
        _TIED,
        Layout(
            "replicate",
            wrapped=("linear0",),
            options=(("hook", "allreduce_hook"), ("mesh", "1x2"), ("ignored", ("linear2",)), ("bucket_cap_mb", 0.5)),
        ),
        _STEPS,
        Optimizer("sgd", 0.25, 0.5, 0.5),
        "float32",
        sparse=True,
    ),
    "replicate_fsdp": Program(
        _OWN_DTYPE,
        Layout(
            "replicate_fsdp",
            wrapped=("linear0", "norm1"),
            options=(("param_dtype", "bfloat16"), ("output_dtype", "float32"), ("divide", 2.0), ("recast", True)),
        ),
        _STEPS,
        _ADAMW,
        "float32",
        rotated=1,
        same_data=True,
    ),
    "tp_extension": Program(
        Model((4,), (Linear(4), Linear(4))),
        Layout(
            "tp_extension",
            4,
            2,
            ("linear1",),
            (("linear0", "columns"), ("linear1", "rows")),
            (("use_orig_params", False), ("strategy", "HYBRID_SHARD"), ("replicas", 2), ("reduce_dtype", "float16")),
        ),
        _STEPS,
        dtype="float32",
    ),
    "dynamo": Program(
        _MODEL,
        Layout(
            "dynamo",
            options=(("find_unused_parameters", True), ("inner", "replicate")),
            compiled=Compile("eager", True, True, True, True),
        ),
        (Step((4, 4), zero="zero", evaluate=True),),
        _ADAMW,
    ),
}
"""Of every stack one that it takes, with something in nearly every field; all of them together have every layer."""


def changed(value: Any, by: Any) -> Iterator[tuple[str, Any]]:
    """Copies of a value, each with something else instead of one of its leaves; and where that is.

    Of structs, dicts, lists and tuples; nothing is held to its type.  Keys of dicts are leaves as well.
    """
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            for where, other in changed(getattr(value, field), by):
                yield f".{field}{where}", msgspec.structs.replace(value, **{field: other})
    elif isinstance(value, dict):
        for key, part in value.items():
            rest = {k: v for k, v in value.items() if k != key}
            yield f".{key}, the key", {**rest, by if isinstance(by, str) else str(by): part}
            for where, other in changed(part, by):
                yield f".{key}{where}", {**value, key: other}
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            for where, other in changed(part, by):
                yield f"[{i}]{where}", type(value)([*value[:i], other, *value[i + 1 :]])
    else:
        yield "", by
