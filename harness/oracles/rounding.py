"""A recorder of runs, which executes a run again with rounding errors in every operation, on all samples at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import _functorch
from torch._C._functorch import is_batchedtensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.oracles.operators import OPERATORS, Operator
from harness.oracles.rounding_noise import cut_before, cut_out, noise_of
from harness.oracles.rounding_operations import Operation, length_of, one_by_one, operation_of, without_writing

UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Unit roundoff: the largest relative error of one rounding to nearest."""

WIDEN = 3.0
"""The errors of samples are this many times as large as those of a real run."""

_TRUE = torch.float64
_HALF_TINY = 2.0**-25  # half the distance between float16's smallest numbers
_UNKNOWN = Operator()


class _Slot(NamedTuple):
    """A placeholder for a tensor in recorded arguments."""

    number: int


class _Errors(NamedTuple):
    """The sizes of the random errors around an operation, relative to the numbers that get them."""

    operands: float = 0.0
    leading: int = 0
    """How many leading operands get errors."""
    first: float = 0.0
    """Errors of the results that are relative to the first operand."""
    results: float = 0.0


class _Step(NamedTuple):
    """A recorded operation."""

    call: Callable[..., Any]
    """A function without side effects, even for operations that write."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...] = ()
    """The slots of the results; -1 for a result that is not a tensor."""
    listed: bool = False
    """Whether ``call`` returns a sequence."""
    view: bool = False
    """Whether the results lie in a storage that existed before."""
    written: int = -1
    """The slot to which the result is written; -1 for none."""
    errors: _Errors = _Errors()


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records every operation of a run, to execute it again on all samples at once, without autograd.

    The tape identifies a tensor by its storage, offset, sizes, strides and dtype.
    """

    def __init__(self, dtype: torch.dtype, world: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype
        # The truth in float64 has rounding errors of its own, as large as those of the run that is compared with it.
        self._unit = WIDEN * UNIT[dtype] * (math.sqrt(2) if dtype == _TRUE else 1.0)
        self._unit_within = min(self._unit, WIDEN * UNIT[torch.float32])
        self._world = world
        self._steps: list[_Step] = []
        self._slots: dict[_Place, int] = {}
        self._bases: dict[int, int] = {}
        """The first slot in each storage."""
        self._storages: list[int] = []
        """The storage of each slot."""
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []
        """The shape and dtype of each slot."""
        self._alive: list[torch.UntypedStorage] = []
        self._constants: dict[int, torch.Tensor] = {}
        self._mutated: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = operation_of(func)
        kind = operation.kind
        if kind == "list":
            with self:
                return one_by_one(operation.name, args, kwargs)
        if kind == "read":
            return func(*args, **kwargs)
        if kind == "made" or (kind == "random" and not operation.writes):
            made = func(*args, **kwargs)
            for tensor in (made,) if isinstance(made, torch.Tensor) else made:
                self._slot(tensor)
            return made
        if kind == "unknown":
            raise NotImplementedError(f"the bounded oracle cannot follow {func}")
        # Before the operation, so that the values of new tensors are kept as they were.
        taken = tuple([self._mark(a) for a in args])
        named = {key: self._mark(value) for key, value in kwargs.items()} if kwargs else kwargs
        result = func(*args, **kwargs)
        if operation.writes:
            self._write(func, operation, args, taken, named)
            return result
        listed = not isinstance(result, torch.Tensor)
        results = result if listed else (result,)
        tensors = [(t, _place(t)) if isinstance(t, torch.Tensor) else None for t in results]
        view = kind == "view" or any(each[1][0] in self._bases for each in tensors if each)
        if view and all(each[1] in self._slots for each in tensors if each):
            return result  # detach(), or a view that is already recorded
        errors = _NONE if view else self._errors(operation, args, results)
        slots = tuple([self._new(*each) if each else -1 for each in tensors])
        if operation.name == "native_batch_norm" and args[5]:
            self._batch_norm(args, taken, slots)
            return result
        self._steps.append(_Step(func, taken, named, slots, listed, view, errors=errors))
        return result

    def _batch_norm(self, args: tuple[Any, ...], taken: tuple[Any, ...], slots: tuple[int, ...]) -> None:
        """Record batch normalization in training as several steps.

        It rounds the mean and the deviation before it uses them, and it writes to its running statistics although its
        schema does not say so.
        """
        x, momentum, eps = args[0], args[6], args[7]
        rows = x.numel() // x.shape[1]
        over = [d for d in range(x.dim()) if d != 1]
        unit, within = self._unit, self._unit_within
        sums = self._sum(rows, within)

        def of_channel(values: torch.Tensor | None, otherwise: float) -> torch.Tensor | float:
            return otherwise if values is None else values.reshape(-1, *[1] * (x.dim() - 2))

        def mean(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = x.mean(dim=over)
            return result

        def inverse(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = ((x - of_channel(mean, 0.0)).square().mean(dim=over) + eps).rsqrt()
            return result

        def normal(
            x: torch.Tensor,
            mean: torch.Tensor,
            inverse: torch.Tensor,
            weight: torch.Tensor | None,
            bias: torch.Tensor | None,
        ) -> torch.Tensor:
            scale = of_channel(inverse, 1.0) * of_channel(weight, 1.0)
            result: torch.Tensor = (x - of_channel(mean, 0.0)) * scale + of_channel(bias, 0.0)
            return result

        def moved(running: torch.Tensor, of_batch: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = (1 - momentum) * running + momentum * of_batch
            return result

        def moved_variance(running: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
            return moved(running, inverse.pow(-2).sub(eps).mul(rows / (rows - 1)))

        batch = (_Slot(slots[1]), _Slot(slots[2]))
        self._steps.append(_Step(mean, taken[:1], {}, slots[1:2], errors=sums))
        self._steps.append(_Step(inverse, (taken[0], batch[0]), {}, slots[2:], errors=sums))
        # A kernel may add x * scale and -mean * scale, which cancel.
        inner = _Errors(within, 2, 0.0, unit)
        self._steps.append(_Step(normal, (taken[0], *batch, *taken[1:3]), {}, slots[:1], errors=inner))
        for number, call, of_batch in ((3, moved, batch[0]), (4, moved_variance, batch[1])):
            if isinstance(args[number], torch.Tensor):
                self._mutated.add(_storage(args[number]))
                slot = taken[number].number
                given = (_Slot(slot), of_batch)
                self._steps.append(_Step(call, given, {}, written=slot, errors=_Errors(results=unit)))

    def _write(
        self, func: Any, operation: Operation, args: tuple[Any, ...], taken: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        target, slot = args[0], taken[0].number
        self._mutated.add(_storage(target))
        if operation.kind == "random":
            drawn = self._constant(target.detach().clone(), -1)
            self._steps.append(_Step(torch.clone, (_Slot(drawn),), {}, written=slot))
            return
        errors = self._errors(operation, args, (target,))
        self._steps.append(_Step(without_writing(func, operation.name), taken, named, written=slot, errors=errors))

    def _errors(self, operation: Operation, args: tuple[Any, ...], results: Sequence[Any]) -> _Errors:
        if operation.kind == "exact" or not any(isinstance(t, torch.Tensor) and t.dtype == _TRUE for t in results):
            return _NONE
        unit, within = self._unit, self._unit_within
        known = OPERATORS.get(operation.name, _UNKNOWN)
        if operation.kind == "pointwise":
            return _Errors(first=within if known.cancels else 0.0, results=unit)
        if known.own_precision:
            within = unit
        length = length_of(operation.name, args, results)
        return self._sum(length, within, known.factors)

    def _sum(self, length: int, within: float, leading: int = 1) -> _Errors:
        """Return the errors of a sum of ``length`` terms that is accumulated with the unit roundoff ``within``.

        ``leading``: how many leading operands are factors of the terms.  docs/tolerances.md derives the formulas.
        """
        unit = self._unit
        parts = self._world if self._world > 1 else 0
        operands = math.sqrt(unit**2 * (1 + parts / 2) * bool(parts) + within**2 * length / 2)
        out = math.sqrt(unit**2 * (1 + (2 + parts / 3) * bool(parts)) + within**2 * length / 3)
        # Errors that are small compared to the rounding of the result are not worth their time.
        return _Errors(operands if operands > out / 20 else 0.0, leading, 0.0, out)

    def _mark(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _Slot(self._slot(value))
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            return [self._mark(v) for v in value]
        return value

    def _slot(self, tensor: torch.Tensor) -> int:
        """Return the slot of a tensor, which may be new."""
        place = _place(tensor)
        slot = self._slots.get(place)
        if slot is not None:
            return slot
        base = self._bases.get(place[0])
        if base is None:
            whole = tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
            self._constants[self._new(whole, _place(whole))] = whole.clone()
            return self._slot(tensor)
        slot = self._new(tensor, place)
        strided = (_Slot(base), tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        self._steps.append(_Step(torch.as_strided, strided, {}, (slot,), view=True))
        return slot

    def _new(self, tensor: torch.Tensor, place: _Place) -> int:
        slot = self._slots[place] = len(self._storages)
        self._storages.append(place[0])
        self._kinds.append((tensor.shape, tensor.dtype))
        if place[0] not in self._bases:
            self._bases[place[0]] = slot
            self._alive.append(tensor.untyped_storage())  # otherwise, another tensor could get the same place later
        return slot

    def _constant(self, value: torch.Tensor, storage: int) -> int:
        slot = len(self._storages)
        self._storages.append(storage)
        self._kinds.append((value.shape, value.dtype))
        self._constants[slot] = value
        return slot

    def replay(self, wanted: Sequence[torch.Tensor], samples: int, seed: int) -> list[torch.Tensor]:
        """Execute the run again, and return [1 + samples, *shape] for each tensor in ``wanted``.

        The first sample has no random errors.
        """
        outputs = [self._slot(tensor) for tensor in wanted]
        noise, rounded, starts = noise_of(samples, seed)
        if self._dtype == torch.float16:
            rounded = rounded.index_fill(0, torch.tensor(0), True)  # it underflows as every run does
        env: dict[int, torch.Tensor] = {}
        varied: dict[int, torch.Tensor] = {}
        for i, (slot, constant) in enumerate(self._constants.items()):
            held = self._held(constant)
            if held is not None:
                where = rounded[:, i % rounded.shape[1]].reshape(-1, *[1] * constant.dim())
                varied[slot] = torch.where(where, held, constant)
            elif self._storages[slot] in self._mutated:
                varied[slot] = constant.expand(samples + 1, *constant.shape).clone()
            else:
                env[slot] = constant
        self._steps = [self._reshaped(step) for step in self._steps]
        slots, values = list(varied), list(varied.values())
        # Half of the samples underflow where every run does.  In the others, underflow is random as well.
        tiny = torch.full((samples + 1,), _HALF_TINY / UNIT[torch.float16], dtype=_TRUE)
        tiny[1::2] = 0

        # To cut an error out of the noise costs as much as to inject it, unless an earlier program has cut it already.
        cut = [cut_before(samples, seed, at, shape) for at, shape in enumerate(self._shapes_of_errors(), 1)]

        def once(
            values: Sequence[torch.Tensor], tiny: torch.Tensor, noise: torch.Tensor, cut: Sequence[torch.Tensor]
        ) -> tuple[torch.Tensor, ...]:
            return self._execute({**env, **dict(zip(slots, values, strict=True))}, tiny, noise, cut, starts, outputs)

        with torch.no_grad():
            try:
                _functorch._set_vmap_fallback_warning_enabled(False)  # type: ignore[attr-defined]
                return list(torch.func.vmap(once)(values, tiny, noise, cut))
            except (RuntimeError, ValueError):
                # Some operation cannot be executed on all samples at once, so execute one sample after the other.
                each = [
                    once([v[k].clone() for v in values], tiny[k], noise[k], [c[k] for c in cut])
                    for k in range(samples + 1)
                ]
                return [torch.stack(tensors) for tensors in zip(*each, strict=True)]

    def _shapes_of_errors(self) -> list[torch.Size]:
        """Return the shapes of the errors that :meth:`_execute` will inject, in order."""
        shapes: list[torch.Size] = []
        for step in self._steps:
            errors = step.errors
            if errors.operands:
                kinds = [self._kinds[mark.number] for mark in step.args[: errors.leading] if type(mark) is _Slot]
                shapes += [shape for shape, dtype in kinds if dtype == _TRUE and shape]
            if errors.results:
                slots = (step.written,) if step.written >= 0 else [slot for slot in step.results if slot >= 0]
                for shape, dtype in (self._kinds[slot] for slot in slots):
                    shapes += [shape] * (dtype == _TRUE) * (2 if errors.first else 1)
        return shapes

    def _reshaped(self, step: _Step) -> _Step:
        """Replace a view by a reshape if nothing is written there, since strides can differ when executed again."""
        if step.call is torch.ops.aten.view.default and self._storages[step.results[0]] not in self._mutated:
            return step._replace(call=torch.reshape)
        return step

    def _held(self, constant: torch.Tensor) -> torch.Tensor | None:
        """Return a constant rounded to the dtype; None if that changes nothing."""
        if constant.dtype != _TRUE or self._dtype == _TRUE:
            return None
        held = constant.to(self._dtype).to(_TRUE)
        return held if bool((held != constant).any()) else None

    def _execute(
        self,
        env: dict[int, torch.Tensor],
        tiny: torch.Tensor,
        noise: torch.Tensor,
        cut: Sequence[torch.Tensor],
        starts: Sequence[int],
        outputs: Sequence[int],
    ) -> tuple[torch.Tensor, ...]:
        mutated, storages = self._mutated, self._storages
        half = self._dtype == torch.float16
        zero = 0 * tiny
        at = 0

        def of_each(tensor: torch.Tensor) -> torch.Tensor:
            """Give each sample a tensor of its own if all samples share one."""
            return tensor if is_batchedtensor(tensor) else tensor + zero.to(tensor.dtype)

        def errors(shape: torch.Size) -> torch.Tensor:
            nonlocal at
            at += 1
            if at <= len(cut) and cut[at - 1].shape == shape:
                return cut[at - 1]
            return cut_out(noise, starts[at % len(starts)], shape)

        def moved(tensor: torch.Tensor, size: float) -> torch.Tensor:
            if not half:
                return torch.addcmul(tensor, tensor, errors(tensor.shape), value=size)
            # float16 also loses values below its smallest and above its largest number.
            scale = torch.where(tensor == 0, 0.0, tensor.abs() + tiny)
            rounded = torch.addcmul(tensor, scale, errors(tensor.shape), value=size).to(torch.float16).to(_TRUE)
            return torch.where(rounded * tensor < 0, 0.0, rounded)  # rounding never changes a sign

        def value(mark: Any) -> Any:
            if type(mark) is _Slot:
                return env[mark.number]
            return [value(m) for m in mark] if type(mark) is list else mark

        for step in self._steps:
            args = [value(mark) for mark in step.args]
            kwargs = {key: value(mark) for key, mark in step.kwargs.items()} if step.kwargs else {}
            sizes = step.errors
            if sizes.operands:
                for i, arg in enumerate(args[: sizes.leading]):
                    if isinstance(arg, torch.Tensor) and arg.dtype == _TRUE and arg.dim():
                        args[i] = moved(arg, sizes.operands)
            given = step.call(*args, **kwargs)
            results = list(given) if step.listed else [given]
            if sizes.results:
                for i, result in enumerate(results):
                    if isinstance(result, torch.Tensor) and result.dtype == _TRUE:
                        result = moved(result, sizes.results)
                        if sizes.first:
                            result = torch.addcmul(result, args[0], errors(result.shape), value=sizes.first)
                        results[i] = result
            if step.written >= 0:
                env[step.written].copy_(results[0])
                continue
            for slot, result in zip(step.results, results, strict=True):
                if slot >= 0:
                    if not step.view and not sizes.results and storages[slot] in mutated:
                        result = of_each(result)
                    env[slot] = result
        return tuple([of_each(env[slot]) for slot in outputs])


_Place = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
_NONE = _Errors()


def _storage(tensor: torch.Tensor) -> int:
    # Empty storages have no address.  All of a dtype share one.
    return tensor.untyped_storage().data_ptr() or -id(tensor.dtype)


def _place(tensor: torch.Tensor) -> _Place:
    return _storage(tensor), int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


__all__ = ["UNIT", "Tape"]
