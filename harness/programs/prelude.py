"""The definitions that a program's source uses, with torch alone: modules, data, and one party's run.

A reproducer contains the definitions of this file that it uses, so nothing here may import Concord.
"""

from __future__ import annotations

import contextlib
import math
import random
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.stacks.seen import Kind, Pass, Seen
from harness.stacks.training import Party, finish, gradients, launched, optimizer_state, plain, reload, set_sync, since

# modules


def through(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """Apply layers one after another."""
    for layer in layers:
        x = layer(x)
    return x


class Residual(nn.Sequential):
    """A residual block: ``x + body(x)``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + through(self, x)


class Twice(nn.Sequential):
    """Layers that are applied twice in a row, so that each parameter is used twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return through(self, through(self, x))


class Function(nn.Module):
    """An elementwise function, given by its name in torch or torch.nn.functional."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = getattr(torch, name, None) or getattr(nn.functional, name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.function(x)
        return result


class Hooked(nn.Sequential):
    """A layer with a hook that changes what passes through, and counts its own calls."""

    def __init__(self, layer: nn.Module, kind: str) -> None:
        super().__init__(layer)
        self.calls = 0
        self.kind = kind
        if kind == "forward":
            layer.register_forward_hook(self.doubled)
        elif kind == "before":
            layer.register_forward_pre_hook(self.negated)
        elif kind == "backward":
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

    def doubled_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return 2 * gradient

    def doubled_of_node(self, gradients: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        self.calls += 1
        return (2 * gradients[0],)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "backward" and torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # so that there is a gradient for the hook to double
        if self.kind == "saved":
            with torch.autograd.graph.saved_tensors_hooks(torch.neg, torch.neg):
                return through(self, x)
        x = through(self, x)
        if self.kind == "tensor" and x.requires_grad:
            x.register_hook(self.doubled_gradient)  # type: ignore[no-untyped-call]
        elif self.kind == "node" and x.grad_fn is not None:
            x.grad_fn.register_prehook(self.doubled_of_node)
        return x


class Checkpointed(nn.Sequential):
    """Layers whose forward is repeated in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(through, self, x, use_reentrant=False)
        return result


class Cast(nn.Module):
    """A layer whose parameters have their own dtype: the input is cast to that dtype, and the output back."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = next(self.layer.parameters()).dtype
        result: torch.Tensor = self.layer(x.to(inner))
        return result.to(x.dtype)


class Scale(nn.Module):
    """A multiplication by a float buffer.

    ``rebound``: whether every forward in training assigns a new tensor to the buffer's name. ``shares``: if there are
    several, the rows are split into as many parts, and each part is multiplied by the buffer plus its share.
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
    """A layer that zeroes every other feature, using a bool buffer."""

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
    """Return data as float64[shape]; the same key gives the same data.

    The data are integers from -span to span without 0, or uniform numbers from -1 to 1 if span is 0, divided by the
    denominator.
    """
    numbers = [number / denominator for number in range(-span, span + 1) if number]
    generator, count = random.Random(zlib.crc32(repr(key).encode())), math.prod(shape)  # noqa: S311  data, not a secret
    drawn = (
        generator.choices(numbers, k=count) if span else [generator.uniform(-1, 1) / denominator for _ in range(count)]
    )
    return torch.tensor(drawn, dtype=torch.float64).view(tuple(shape))


def fill(model: nn.Module, seed: int, span: int, denominator: int, *, sparse: bool = False) -> nn.Module:
    """Fill every parameter and float buffer with its own values; running statistics stay as they are.

    ``sparse``: keep only one number in each row of a weight, in the next column for each next row, and set the others
    to zero.
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
    """Return a layer's own dtype, or float64 if the run is in float64 to compute the expected values."""
    return dtype if dtype == torch.float64 else own


def per_part(party: Party, scale: Scale, parts: int) -> None:
    """Multiply part i of a batch by i more than the scale says.

    A party that trains on one part adds i to its buffer. A party that has the whole batch treats each part of the rows
    separately.
    """
    if party.parts == parts:
        scale.shares = [0]
        scale.scale += party.part
    else:
        scale.shares = list(range(parts))


def toggle(model: nn.Module, name: str) -> None:
    """Toggle whether a layer's parameters require gradients."""
    for parameter in model.get_submodule(name).parameters():
        parameter.requires_grad_(not parameter.requires_grad)


class Interrupted(Exception):
    """What a layer raises in an abandoned forward."""


def interrupt(layer: nn.Module, inputs: Any) -> None:
    """Raise :class:`Interrupted`: a forward pre-hook."""
    raise Interrupted


# one party


class Run:
    """What one party does and sees. The party is the single device with the whole batch, or a rank with its part."""

    def __init__(self, party: Party, *, seed: int, span: int, denominator: int, inputs: Sequence[int], tokens: int):
        self.party = party
        self.seed, self.span, self.denominator = seed, span, denominator
        self.inputs, self.tokens = tuple(inputs), tokens
        self.seen: dict[Seen, torch.Tensor] = {}
        """Everything that is compared, in order."""
        self.turn = 0
        self.averages: list[torch.Tensor] = []
        """The moving average of each parameter, as the party has the parameter."""

    def count(self, phase: Literal["forward", "synced", "unsynced"], before: dict[tuple[int, ...], int]) -> None:
        """Record this micro-batch's collectives by group since ``before``, and its calls of communication hooks."""
        key = Pass(self.turn, phase)
        self.party.launched[key] = since(before)
        if self.party.buckets:
            self.party.hooked[key] = {module: list(calls) for module, calls in self.party.buckets.items()}
            for calls in self.party.buckets.values():
                calls.clear()

    def note(self, seen: Seen, tensor: torch.Tensor) -> None:
        """Record a copy of a tensor, on the CPU."""
        with torch.no_grad():
            self.seen[seen] = tensor.to("cpu", copy=True)

    def batch(self, rows: int, what: object) -> torch.Tensor:
        """Return a whole batch, [rows, *inputs]: int64 tokens or floats."""
        if self.tokens:
            drawn = random.Random(zlib.crc32(repr((self.seed, what)).encode()))  # noqa: S311  data, not a secret
            words = drawn.choices(range(self.tokens), k=rows * math.prod(self.inputs))
            return torch.tensor(words).view(rows, *self.inputs)
        return values((rows, *self.inputs), (self.seed, what), self.span, self.denominator).to(self.party.dtype)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this party's rows as a new tensor: a compiler treats views at other offsets as other inputs."""
        if self.party.parts > 1:
            whole = whole.tensor_split(self.party.parts)[self.party.part]
        return whole.to(self.party.device, copy=True)

    def backward(self, model: Any, rows: int, *, synced: bool, of: tuple[int, int, int] | None = None) -> None:
        """Run the forward and backward of one micro-batch.

        The loss is a weighted sum of the outputs, so the gradients of the parts add up to those of the whole. Ranks
        average gradients instead of adding them up, so the loss is multiplied by the party's factor.
        ``of``: if the micro-batch is a slice of a larger batch, that batch's number, the first row of the slice, and
        the size of the batch.
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

    def forward(self, model: Any, rows: int, what: str) -> Any:
        """Run a forward on this party's part of a batch of its own, and return the output."""
        return model(self.part(self.batch(rows, (what, self.turn))), self.turn)

    def look_at_output(self, seen: Seen, model: Any, rows: int) -> None:
        """Run a forward in evaluation mode without gradients, and record the output."""
        model.eval()
        with torch.no_grad():
            self.note(seen, self.forward(model, rows, seen.kind))
        model.train()

    def evaluate(self, model: Any, rows: int) -> None:
        """Run a forward in evaluation mode."""
        self.look_at_output(Seen("evaluation", micro_batch=self.turn), model, rows)

    def abandon(self, model: Any, rows: int, *, synced: bool, breaks: bool = False) -> None:
        """Run a forward that no backward follows. ``breaks``: the last layer raises an exception, which is caught.

        ``synced``: whether a backward would average gradients, as that of the next micro-batch does.
        """
        set_sync(self.party, synced)
        hook = None
        if breaks:
            last = [module for module in self.party.root(model).modules() if not list(module.children())][-1]
            hook = last.register_forward_pre_hook(interrupt)
        with contextlib.suppress(Interrupted):
            output = self.forward(model, rows, "abandoned")
            bool(output.isnan().any())  # waits for the output, as the condition for giving up a batch does
        if hook is not None:
            hook.remove()

    def average(self, number: int, model: Any, rows: int) -> None:
        """Move the averages half of the way to the parameters, and run a forward in evaluation mode with the averages.

        The parameters are as before afterwards.
        """
        parameters = list(self.party.root(model).parameters())
        with torch.no_grad():
            if not self.averages:
                self.averages = [parameter.detach().clone() for parameter in parameters]
            for average, parameter in zip(self.averages, parameters, strict=True):
                average.mul_(0.5).add_(parameter, alpha=0.5)
            kept = [parameter.detach().clone() for parameter in parameters]
            for average, parameter in zip(self.averages, parameters, strict=True):
                parameter.copy_(average)
            self.look_at_output(Seen("averaged", step=number), model, rows)
            self.party.handle.forget(self.party.root(model))
            for before, parameter in zip(kept, parameters, strict=True):
                parameter.copy_(before)

    def step(
        self,
        number: int,
        model: Any,
        optimizer: torch.optim.Optimizer,
        *,
        clip: float = 0.0,
        clip_values: float = 0.0,
    ) -> None:
        """Clip gradients, step the optimizer, and record everything."""
        if clip:
            self.note(Seen("norm", step=number), self.party.clip(model, clip))
        if clip_values:
            clipped = [parameter for parameter in self.party.root(model).parameters() if parameter.grad is not None]
            if clipped:  # it fails for none, which a rank may have under FSDP1
                nn.utils.clip_grad_value_(clipped, clip_values)
        optimizer.step()
        self.look(number, model, optimizer)

    def look(self, step: int, model: Any, optimizer: torch.optim.Optimizer, *, reloaded: bool = False) -> None:
        """Record parameters, buffers, optimizer states, and how often hooks were called."""

        def note(kind: Kind, name: str, tensor: torch.Tensor, state: str = "") -> None:
            self.note(Seen(kind, name, step=step, state=state, reloaded=reloaded), tensor)

        others = set()
        for inner, module in self.party.root(model).named_modules():
            name = plain(f"{inner}.").rstrip(".")
            if isinstance(module, Hooked):
                note("calls", name, torch.tensor(module.calls))
            if isinstance(module, Scale) and module.shares:  # its buffer differs from part to part
                others.add(f"{name}.scale")
                scales = [module.scale + share for share in module.shares]
                note("scales", name, torch.stack(scales))
        for category, tensors in optimizer_state(self.party, model, optimizer).items():
            for name, tensor in tensors.items():
                if name in others:
                    continue
                if category == "parameter":
                    note("parameter", name, tensor)
                elif category == "buffer":
                    note("buffer", name, tensor)
                else:
                    note("state", name, tensor, category)

    def reload(self, number: int, model: Any, optimizer: torch.optim.Optimizer) -> None:
        """Save the state dicts, disturb the state, load them again, and record everything."""
        reload(self.party, model, optimizer)
        self.look(number, model, optimizer, reloaded=True)
