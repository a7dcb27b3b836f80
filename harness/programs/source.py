"""A program as Python: a model, how it gets onto ranks, and how it is trained, written down as one would by hand.

The same text is executed alone, on ranks, and in a reproducer, so a reproducer does what was seen to fail.  It stands
on the definitions of :mod:`harness.programs.prelude` and :mod:`harness.stacks.training`, and on nothing else.
"""

from __future__ import annotations

from harness.programs.spec import (
    Activation,
    Attention,
    Branch,
    Container,
    Conv,
    Embedding,
    Hooked,
    Layer,
    Linear,
    Mask,
    Model,
    Named,
    Norm,
    Program,
    Residual,
    Scale,
    Step,
    Tied,
    Twice,
    walk,
    word,
)

_EPS = 0.0625


def source(program: Program) -> str:
    """The program's source: ``Model``, ``build(party)``, ``distribute(party, model)``, ``train(party, model)``.

    Errors: ValueError where a layer can't stand where it is.
    """
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
        name = f"{word(layer)}{number}"
        lines += [f"        {line}" for line in _made(name, layer, model, by_name)]
        forward += [f"        {line}" for line in _used(name, layer)]
        shape = by_name[name].after
    return [*lines, "", *forward, f"        return x  # rows of {shape}"]


def _made(name: str, layer: Layer, model: Model, by_name: dict[str, Named]) -> list[str]:
    if isinstance(layer, Tied):
        shared = f"self.get_submodule({layer.of!r}).weight"
        if layer.alias:
            return [f"self.{name} = {shared}"]
        rows, columns = by_name[name].after[-1], by_name[name].before[-1]
        return [f"self.{name} = nn.Linear({columns}, {rows}, bias=False)", f"self.{name}.weight = {shared}"]
    return [f"self.{name} = {_expression(name, layer, model, by_name)}"]


def _expression(name: str, layer: Layer, model: Model, by_name: dict[str, Named]) -> str:
    shape = by_name[name].before
    match layer:
        case Linear(out=out, bias=bias):
            return _cast(f"nn.Linear({shape[-1]}, {out}{'' if bias else ', bias=False'})", layer.dtype)
        case Conv(out=out, kernel=kernel, bias=bias):
            return f"nn.Conv{len(shape) - 1}d({shape[0]}, {out}, {kernel}{'' if bias else ', bias=False'})"
        case Activation(kind=kind):
            return f"Function({kind!r})"
        case Norm(kind="batch"):
            return f"nn.BatchNorm1d({shape[0]}, eps={_EPS})"
        case Norm(kind=kind):
            # Dividing by next to nothing would make noise of rounding; the default of RMSNorm depends on the dtype.
            return _cast(f"nn.{'LayerNorm' if kind == 'layer' else 'RMSNorm'}({shape[-1]}, eps={_EPS})", layer.dtype)
        case Embedding(width=width):
            return f"nn.Embedding({model.tokens}, {width})"
        case Attention(heads=heads):
            return f"Attention({shape[-1]}, {heads})"
        case Scale(kind=kind):
            return f"Scale({shape[-1]}{', rebound=True' if kind == 'rebound' else ''})"
        case Mask():
            return f"Mask({shape[-1]})"
        case Residual(body=body) | Container(body=body):
            parts = [_expression(f"{name}.{i}", inner, model, by_name) for i, inner in enumerate(body)]
            if isinstance(layer, Residual):
                return f"Residual({', '.join(parts)})"
            if layer.kind == "sequential":
                return f"nn.Sequential({', '.join(parts)})"
            if layer.kind == "list":
                return f"nn.ModuleList([{', '.join(parts)}])"
            return "nn.ModuleDict({" + ", ".join(f'"{i}": {part}' for i, part in enumerate(parts)) + "})"
        case Twice(body=body):
            return f"Twice({_expression(f'{name}.0', body, model, by_name)})"
        case Hooked(body=body, kind=kind):
            return f"Hooked({_expression(f'{name}.0', body, model, by_name)}, {kind!r})"
        case Branch(body=body):
            return f"nn.Sequential({_expression(f'{name}.0', body, model, by_name)})"
    raise TypeError(f"no layer: {layer!r}")


def _cast(expression: str, dtype: str) -> str:
    return f"Cast({expression})" if dtype else expression


def _used(name: str, layer: Layer) -> list[str]:
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
    sparse = ", sparse=True" if program.sparse else ""
    lines = [
        "def build(party):",
        "    with party.device:  # moved later, what is tied might not be any more",
        f"        model = fill(Model(), {program.seed}, {program.span}, {program.denominator}{sparse})",
        "    model.to(dtype=party.dtype)",
    ]
    for n in named:
        if n.dtype:
            lines.append(f"    model.get_submodule({n.name!r}).to(narrower(party.dtype, torch.{n.dtype}))")
        if isinstance(n.layer, Linear) and n.layer.frozen:
            lines.append(f"    model.get_submodule({n.name!r}).requires_grad_(False)")
        if isinstance(n.layer, Scale) and n.layer.kind == "per_rank":
            lines.append(f"    per_part(party, model.get_submodule({n.name!r}), {program.parts})")
    return [*lines, "    return model"]


# onto ranks


def _distribute(program: Program) -> list[str]:
    layout = program.layout
    options = dict(layout.options)
    stack = layout.under
    options.pop("inner", "")
    wrapped = list(layout.wrapped)
    arguments = [f"{key}={value!r}" for key, value in options.items()]
    if stack == "tp_extension":
        arguments[:0] = [f"tensor={layout.tensor}", f"plan={dict(layout.plan)!r}"]
    elif stack == "replicate_fsdp" or not wrapped:
        wrapped.append("")
    steps = [f"model = on_{stack}({', '.join(['party', 'model', repr(wrapped), *arguments])})"]
    if layout.compiled is not None:
        how = layout.compiled
        words = [f"{key}=True" for key in ("fullgraph", "dynamic", "in_place") if getattr(how, key)]
        compiling = f"model = compiled({', '.join(['party', 'model', repr(how.backend), *words])})"
        steps.insert(0 if how.first else 1, compiling)
    return ["def distribute(party, model):", *(f"    {line}" for line in steps), "    return model"]


# training


def _train(program: Program) -> list[str]:
    p = program
    figures = f"seed={p.seed}, span={p.span}, denominator={p.denominator}"
    data = f"inputs={p.model.inputs}, tokens={p.model.tokens}"
    lines = ["def train(party, model):", f"    run = Run(party, {figures}, {data})", f"    {_optimizer(p)}"]
    for number, step in enumerate(p.steps):
        lines += [f"    {line}" for line in _step(number, step)]
    return [*lines, "    return run.seen"]


def _optimizer(program: Program) -> str:
    o = program.optimizer
    words = [f"lr={o.rate!r}"]
    if o.kind == "sgd" and o.momentum:
        words.append(f"momentum={o.momentum!r}")
    if o.weight_decay or o.kind == "adamw":
        words.append(f"weight_decay={o.weight_decay!r}")
    if o.kind == "adamw":
        words.append(f"eps={_EPS}")
    kind = "SGD" if o.kind == "sgd" else "AdamW"
    return f"optimizer = torch.optim.{kind}(model.parameters(), {', '.join(words)}, foreach=False)"


def _step(number: int, step: Step) -> list[str]:
    lines = []
    if step.toggle:
        lines.append(f"toggle(model, {step.toggle!r})")
    if step.evaluate:
        lines.append(f"run.evaluate(model, {step.rows[0]})")
    for i, (rows, synced) in enumerate(zip(step.rows, step.averages, strict=True)):
        joint = f", of=({number}, {sum(step.rows[:i])}, {sum(step.rows)})" if step.joint else ""
        lines.append(f"run.backward(model, {rows}, synced={synced}{joint})")
    clip = f", clip={step.clip!r}" if step.clip else ""
    lines.append(f"run.step({number}, model, optimizer{clip})")
    if step.reload:
        lines.append(f"run.reload({number}, model, optimizer)")
    if step.zero != "keep":
        lines.append(f"optimizer.zero_grad({'set_to_none=False' if step.zero == 'zero' else ''})")
    return lines
