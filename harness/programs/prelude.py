"""What a program's source stands on, with torch alone: modules, data, and one party's run.

A reproducer carries along the definitions of this file that it uses, so nothing here may import Concord.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from harness.stacks.seen import Kind, Pass, Seen
from harness.stacks.training import Party, finish, gradients, launched, optimizer_state, plain, reload, set_sync, since

# modules


def through(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """One layer after another."""
    for layer in layers:
        x = layer(x)
    return x


class Residual(nn.Sequential):
    """``x + body(x)``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + through(self, x)


class Twice(nn.Sequential):
    """The body of the body: each parameter is used twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return through(self, through(self, x))


class Function(nn.Module):
    """A function of each element, by its name in torch or torch.nn.functional."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = getattr(torch, name, None) or getattr(nn.functional, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(x)
        return result


class Hooked(nn.Sequential):
    """A layer with a hook that changes what goes through, and counts how often it was called."""

    def __init__(self, layer: nn.Module, kind: str) -> None:
        super().__init__(layer)
        self.calls = 0
        self.inward = kind == "backward"
        if kind == "forward":
            layer.register_forward_hook(self.doubled)
        elif kind == "before":
            layer.register_forward_pre_hook(self.negated)
        else:
            layer.register_full_backward_hook(self.doubled_gradients)

    def doubled(self, layer: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return 2 * output

    def negated(self, layer: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        self.calls += 1
        return (-inputs[0],)

    def doubled_gradients(self, layer: nn.Module, inputs: Any, outputs: Any) -> Any:
        self.calls += 1
        return tuple(2 * gradient for gradient in inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inward and torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # for the hook to have something to double
        return through(self, x)


class Cast(nn.Module):
    """A layer whose parameters have a dtype of their own: its input is cast to it, its output back."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = next(self.layer.parameters()).dtype
        result: torch.Tensor = self.layer(x.to(inner))
        return result.to(x.dtype)


class Scale(nn.Module):
    """Multiplies with a float buffer; ``rebound`` gives the buffer's name to a new tensor in every forward.

    ``shares``: how much more than the buffer says each part of the rows is multiplied with.
    """

    scale: torch.Tensor

    def __init__(self, features: int, *, rebound: bool = False) -> None:
        super().__init__()
        self.rebound = rebound
        self.shares: list[int] = []
        self.register_buffer("scale", torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rebound and self.training:
            self.scale = -self.scale
        if len(self.shares) > 1:
            rows = zip(x.tensor_split(len(self.shares)), self.shares, strict=True)
            return torch.cat([part * (self.scale + share) for part, share in rows])
        return x * self.scale


class Mask(nn.Module):
    """Zeroes every other feature, by a bool buffer."""

    mask: torch.Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.arange(features) % 2 == 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(self.mask, 0)


class Attention(nn.Module):
    """Self-attention over [rows, length, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        split = self.project(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = split[0], split[1], split[2]
        weights = torch.softmax(query @ key.transpose(-1, -2), dim=-1)
        result: torch.Tensor = self.out((weights @ value).transpose(1, 2).reshape(rows, length, width))
        return result


# data


def values(shape: Sequence[int], key: object, span: int, denominator: int) -> torch.Tensor:
    """float64[shape]: whole numbers from -span to span without 0, or, where span is 0, any numbers from -1 to 1, over
    the denominator; the same for the same key."""
    numbers = [number / denominator for number in range(-span, span + 1) if number]
    generator, count = random.Random(zlib.crc32(repr(key).encode())), math.prod(shape)  # noqa: S311  data, no secret
    drawn = (
        generator.choices(numbers, k=count) if span else [generator.uniform(-1, 1) / denominator for _ in range(count)]
    )
    return torch.tensor(drawn, dtype=torch.float64).view(tuple(shape))


def fill(model: nn.Module, seed: int, span: int, denominator: int, *, sparse: bool = False) -> nn.Module:
    """Give every parameter and float buffer values of its own; running statistics stay as they are.

    ``sparse``: of each row of a weight one number, in one column after the other, and zeros.
    """
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "running" not in name:
                tensor.copy_(values(tensor.shape, (seed, name), span, denominator))
                if sparse and tensor.dim() > 1 and tensor.numel():
                    rows = tensor.flatten(1)
                    columns = torch.arange(rows.shape[1])
                    rows[torch.arange(len(rows))[:, None] % len(columns) != columns] = 0
    return model


def narrower(dtype: torch.dtype, own: torch.dtype) -> torch.dtype:
    """A layer's own dtype; where the truth is computed in float64, everything is."""
    return dtype if dtype == torch.float64 else own


def per_part(party: Party, scale: Scale, parts: int) -> None:
    """Part i of a batch is multiplied by i more: those who have it have that in the buffer."""
    if party.parts == parts:
        scale.shares = [0]
        scale.scale += party.part
    else:
        scale.shares = list(range(parts))


def toggle(model: nn.Module, name: str) -> None:
    """Turn around whether a layer's parameters require gradients."""
    for parameter in model.get_submodule(name).parameters():
        parameter.requires_grad_(not parameter.requires_grad)


# one party


class Run:
    """What one party does and sees: the single device, which has the whole batch, or a rank, which has its part."""

    def __init__(self, party: Party, *, seed: int, span: int, denominator: int, inputs: Sequence[int], tokens: int):
        self.party = party
        self.seed, self.span, self.denominator = seed, span, denominator
        self.inputs, self.tokens = tuple(inputs), tokens
        self.seen: dict[Seen, torch.Tensor] = {}
        """Everything that is compared, in order."""
        self.turn = 0

    def count(self, phase: Literal["forward", "synced", "unsynced"], before: dict[tuple[int, ...], int]) -> None:
        """Keep how many collectives this micro-batch launched on each group since there had been ``before``."""
        key = Pass(self.turn, phase)
        self.party.launched[key] = since(before)
        if self.party.buckets:
            self.party.hooked[key] = {module: list(calls) for module, calls in self.party.buckets.items()}
            for calls in self.party.buckets.values():
                calls.clear()

    def note(self, seen: Seen, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor."""
        with torch.no_grad():
            self.seen[seen] = tensor.to("cpu", copy=True)

    def batch(self, rows: int, what: object) -> torch.Tensor:
        """A whole batch: tokens int64 or floats, [rows, *inputs]."""
        if self.tokens:
            drawn = random.Random(zlib.crc32(repr((self.seed, what)).encode()))  # noqa: S311  data, no secret
            words = drawn.choices(range(self.tokens), k=rows * math.prod(self.inputs))
            return torch.tensor(words).view(rows, *self.inputs)
        return values((rows, *self.inputs), (self.seed, what), self.span, self.denominator).to(self.party.dtype)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This party's rows, a tensor of its own: a compiler would tell views at other offsets apart."""
        if self.party.parts > 1:
            whole = whole.tensor_split(self.party.parts)[self.party.part]
        return whole.to(self.party.device, copy=True)

    def backward(self, model: Any, rows: int, *, synced: bool, of: tuple[int, int, int] | None = None) -> None:
        """One micro-batch; ``of``: the number, first row and size of the batch that it is a slice of.

        The loss is the weighted sum of the outputs, so that gradients of parts add up to those of the whole; ranks
        average what they add up, hence the factor.
        """
        key, first, size = of if of else (self.turn, 0, rows)

        def mine(batch: torch.Tensor) -> torch.Tensor:
            return self.part(batch[first : first + rows] if of else batch)

        set_sync(self.party, synced)
        before = launched()
        output = model(mine(self.batch(size, ("inputs", key))), self.turn)
        self.count("forward", before)
        weights = mine(values((size, *output.shape[1:]), (self.seed, "weights", key), self.span, 1)).to(output)
        before = launched()
        losses = (output * weights).flatten(1).sum(1)
        losses.backward(torch.full_like(losses, self.party.factor))
        self.count("synced" if synced else "unsynced", before)
        self.note(Seen("output", micro_batch=self.turn), output)
        self.note(Seen("losses", micro_batch=self.turn), losses)
        if synced:
            finish(self.party)
            for name, gradient in gradients(self.party, model).items():
                self.note(Seen("gradient", name, micro_batch=self.turn), gradient)
        self.turn += 1

    def evaluate(self, model: Any, rows: int) -> None:
        """A forward in evaluation mode."""
        model.eval()
        with torch.no_grad():
            output = model(self.part(self.batch(rows, ("evaluation", self.turn))), self.turn)
        self.note(Seen("evaluation", micro_batch=self.turn), output)
        model.train()

    def step(self, number: int, model: Any, optimizer: torch.optim.Optimizer, *, clip: float = 0.0) -> None:
        """Clip, step, and look at everything."""
        if clip:
            self.note(Seen("norm", step=number), self.party.clip(model, clip))
        optimizer.step()
        self.look(number, model, optimizer)

    def look(self, step: int, model: Any, optimizer: torch.optim.Optimizer, *, reloaded: bool = False) -> None:
        """Keep parameters, buffers, the optimizer's state, and how often hooks were called."""

        def note(kind: Kind, name: str, tensor: torch.Tensor, state: str = "") -> None:
            self.note(Seen(kind, name, step=step, state=state, reloaded=reloaded), tensor)

        others = set()
        for inner, module in self.party.root(model).named_modules():
            name = plain(f"{inner}.").rstrip(".")
            if isinstance(module, Hooked):
                note("calls", name, torch.tensor(module.calls))
            if isinstance(module, Scale) and module.shares:  # each part has another
                others.add(f"{name}.scale")
                scales = [module.scale + share for share in module.shares]
                note("scales", name, torch.stack(scales))
        for what, tensors in optimizer_state(self.party, model, optimizer).items():
            for name, tensor in tensors.items():
                if name in others:
                    continue
                if what == "parameter":
                    note("parameter", name, tensor)
                elif what == "buffer":
                    note("buffer", name, tensor)
                else:
                    note("state", name, tensor, what)

    def reload(self, number: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Save, disturb, load."""
        reload(self.party, model, optimizer)
        self.look(number, model, optimizer, reloaded=True)
