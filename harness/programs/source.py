"""Write a program as Python: a model, how it is put on ranks, and how it is trained, as one would write it by hand.

The same text is executed alone, on ranks, and in a reproducer, so a reproducer does exactly what failed. It uses the
definitions of :mod:`harness.programs.prelude`, of :mod:`harness.stacks.training` and of its stack's file.

A program may come from an untrusted source. Its types are checked before anything is written, and its values get into
the text only through :mod:`harness.programs.literals`.
"""

from __future__ import annotations

from harness.programs import literals
from harness.programs.literals import Code, call, literal
from harness.programs.validity import check_types
from harness.specs.program import (
    Activation,
    Attention,
    Branch,
    Checkpointed,
    Container,
    Conv,
    Embedding,
    Hooked,
    Layer,
    Linear,
    Mask,
    Model,
    Norm,
    Program,
    Residual,
    Scale,
    Step,
    Tied,
    Twice,
)
from harness.specs.shapes import Named, walk, word
from harness.stacks.registry import parted, stack_of
from harness.stacks.training import Handle

_EPS = 0.0625
_MODEL = (Code("party"), Code("model"))
_TRAINED = (Code("model"), Code("optimizer"))


def source(program: Program) -> str:
    """Return the program's source: ``Model``, ``build(party)``, ``distribute(party, model)``, ``train(party, model)``.

    Errors: ValueError for a layer that can't be where it is, and for a field whose value is not of its type.
    """
    check_types(program)
    named = list(walk(program.model))
    blocks = [_model(program.model, named), _build(program, named), _distribute(program), _train(program)]
    return "\n\n\n".join("\n".join(block) for block in blocks) + "\n"


# the model


def _model(model: Model, named: list[Named]) -> list[str]:
    by_name = {n.name: n for n in named}
    lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    forward = ["    def forward(self, x, turn):"]
    shape = model.inputs
    for number, layer in enumerate(model.layers):
        name = literals.name(f"{word(layer)}{number}")
        lines += [f"        {line}" for line in _made(name, layer, model, by_name)]
        forward += [f"        {line}" for line in _used(name, layer)]
        shape = by_name[name].after
    return [*lines, "", *forward, f"        return x  # rows of {literal(shape)}"]


def _made(name: Code, layer: Layer, model: Model, by_name: dict[str, Named]) -> list[str]:
    if isinstance(layer, Tied):
        shared = f"{call('self.get_submodule', layer.of)}.weight"
        if layer.alias:
            return [f"self.{name} = {shared}"]
        rows, columns = by_name[name].after[-1], by_name[name].before[-1]
        return [f"self.{name} = {call('nn.Linear', columns, rows, bias=False)}", f"self.{name}.weight = {shared}"]
    return [f"self.{name} = {_expression(name, layer, model, by_name)}"]


def _expression(name: str, layer: Layer, model: Model, by_name: dict[str, Named]) -> Code:
    shape = by_name[name].before
    match layer:
        case Linear(out=out, bias=bias):
            return _cast(call("nn.Linear", shape[-1], out, **({} if bias else {"bias": False})), layer.dtype)
        case Conv(out=out, kernel=kernel, bias=bias):
            kind = f"nn.Conv{literal(len(shape) - 1)}d"
            return call(kind, shape[0], out, kernel, **({} if bias else {"bias": False}))
        case Activation(kind=kind):
            return call("Function", kind)
        case Norm(kind="batch"):
            return call("nn.BatchNorm1d", shape[0], eps=_EPS)
        case Norm(kind=kind):
            # A large eps, because division by almost zero would turn rounding errors into noise. RMSNorm's default
            # depends on the dtype.
            return _cast(call("nn.LayerNorm" if kind == "layer" else "nn.RMSNorm", shape[-1], eps=_EPS), layer.dtype)
        case Embedding(width=width):
            return call("nn.Embedding", model.tokens, width)
        case Attention(heads=heads):
            return call("Attention", shape[-1], heads)
        case Scale(kind=kind):
            return call("Scale", shape[-1], **({"rebound": True} if kind == "rebound" else {}))
        case Mask():
            return call("Mask", shape[-1])
        case Residual(body=body) | Container(body=body):
            parts = [_expression(f"{name}.{i}", inner, model, by_name) for i, inner in enumerate(body)]
            if isinstance(layer, Residual):
                return call("Residual", *parts)
            if layer.kind == "sequential":
                return call("nn.Sequential", *parts)
            if layer.kind == "list":
                return call("nn.ModuleList", Code(f"[{', '.join(parts)}]"))
            entries = ", ".join(f'"{literal(i)}": {part}' for i, part in enumerate(parts))
            return call("nn.ModuleDict", Code("{" + entries + "}"))
        case Twice(body=body):
            return call("Twice", _expression(f"{name}.0", body, model, by_name))
        case Hooked(body=body, kind=kind):
            return call("Hooked", _expression(f"{name}.0", body, model, by_name), kind)
        case Checkpointed(body=body):
            return call("Checkpointed", _expression(f"{name}.0", body, model, by_name))
        case Branch(body=body):
            return call("nn.Sequential", _expression(f"{name}.0", body, model, by_name))
    raise TypeError(f"no layer: {layer!r}")


def _cast(expression: Code, dtype: str) -> Code:
    return call("Cast", expression) if dtype else expression


def _used(name: Code, layer: Layer) -> list[str]:
    match layer:
        case Tied(alias=True):
            return [f"x = nn.functional.linear(x, self.{name})"]
        case Branch(when="never"):
            return [f"# self.{name} is not used"]
        case Branch(when=when):
            return [f"if turn % 2 == {int(when == 'odd')}:", f"    x = self.{name}(x)"]
        case Container(kind="list"):
            return [f"for layer in self.{name}:", "    x = layer(x)"]
        case Container(kind="dict"):
            return [f"for layer in self.{name}.values():", "    x = layer(x)"]
    return [f"x = self.{name}(x)"]


def _build(program: Program, named: list[Named]) -> list[str]:
    sparse = {"sparse": True} if program.sparse else {}
    filled = call("fill", Code("Model()"), program.seed, program.span, program.denominator, **sparse)
    lines = [
        "def build(party):",
        "    with party.device:  # moved later, what is tied might not be any more",
        f"        model = {filled}",
        "    model.to(dtype=party.dtype)",
    ]
    for n in named:
        module = call("model.get_submodule", n.name)
        if n.dtype:
            narrowed = call("narrower", Code("party.dtype"), Code(f"torch.{literals.name(n.dtype)}"))
            lines.append(f"    {module}.to({narrowed})")
        if isinstance(n.layer, Linear) and n.layer.frozen:
            lines.append(f"    {module}.requires_grad_(False)")
        if isinstance(n.layer, Scale) and n.layer.kind == "per_rank":
            lines.append(f"    {call('per_part', Code('party'), module, program.parts)}")
    return [*lines, "    return model"]


# onto ranks


def _distribute(program: Program) -> list[str]:
    layout = program.layout
    stack, _, options = parted(layout)
    wrapped, words = stack.arguments(layout)
    steps = [f"model = {call(f'on_{literals.name(stack.name)}', *_MODEL, wrapped, **{**words, **options})}"]
    if layout.compiled is not None:
        how = layout.compiled
        asked = {key: True for key in ("fullgraph", "dynamic", "in_place") if getattr(how, key)}
        steps.insert(0 if how.first else 1, f"model = {call('compiled', *_MODEL, how.backend, **asked)}")
    return ["def distribute(party, model):", *(f"    {line}" for line in steps), "    return model"]


# training


def _train(program: Program) -> list[str]:
    p = program
    figures = {"seed": p.seed, "span": p.span, "denominator": p.denominator}
    run = call("Run", Code("party"), **figures, inputs=p.model.inputs, tokens=p.model.tokens)
    lines = ["def train(party, model):", f"    run = {run}", f"    {_optimizer(p)}"]
    if p.optimizer.decay:
        scheduler = call("torch.optim.lr_scheduler.ExponentialLR", Code("optimizer"), p.optimizer.decay)
        lines.append(f"    scheduler = {scheduler}")
    if stack_of(p.layout).handle.optimizer is not Handle.optimizer:
        lines.append(f"    optimizer = {call('with_optimizer', Code('party'), *_TRAINED)}")
    for number, step in enumerate(p.steps):
        lines += [f"    {line}" for line in _step(number, step, scheduled=bool(p.optimizer.decay))]
    return [*lines, "    return run.seen"]


def _optimizer(program: Program) -> str:
    o = program.optimizer
    words: dict[str, object] = {"lr": o.rate}
    if o.kind == "sgd" and o.momentum:
        words["momentum"] = o.momentum
    if o.weight_decay or o.kind == "adamw":
        words["weight_decay"] = o.weight_decay
    if o.kind == "adamw":
        words["eps"] = _EPS
    form = {"fused": True} if o.form == "fused" else {"foreach": o.form == "foreach"}
    kind = "torch.optim.SGD" if o.kind == "sgd" else "torch.optim.AdamW"
    return f"optimizer = {call(kind, Code('model.parameters()'), **words, **form)}"


def _step(number: int, step: Step, *, scheduled: bool) -> list[Code]:
    lines = []
    if step.toggle:
        lines.append(call("toggle", _MODEL[1], step.toggle))
    if step.evaluate:
        lines.append(call("run.evaluate", _MODEL[1], step.rows[0]))
    if step.abandoned:
        breaks = {"breaks": True} if step.abandoned == "layer" else {}
        lines.append(call("run.abandon", _MODEL[1], step.rows[0], synced=step.averages[0], **breaks))
    for i, (rows, synced) in enumerate(zip(step.rows, step.averages, strict=True)):
        joint = {"of": (number, sum(step.rows[:i]), sum(step.rows))} if step.joint else {}
        lines.append(call("run.backward", _MODEL[1], rows, synced=synced, **joint))
    clip = {name: most for name in ("clip", "clip_values") if (most := getattr(step, name))}
    lines.append(call("run.step", number, *_TRAINED, **clip))
    if scheduled:
        lines.append(call("scheduler.step"))
    if step.averaged:
        lines.append(call("run.average", number, _MODEL[1], step.rows[0]))
    if step.reload:
        lines.append(call("run.reload", number, *_TRAINED))
    if step.zero != "keep":
        lines.append(call("optimizer.zero_grad", **({"set_to_none": False} if step.zero == "zero" else {})))
    return lines
