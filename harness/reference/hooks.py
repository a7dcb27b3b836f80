"""Communication hooks of DDP, and the buckets of gradients that they get."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.reference.dtensors import local

Hook = Callable[[Any, "Bucket"], torch.futures.Future[torch.Tensor]]


def require_hook(hook: Any) -> None:
    """Check a communication hook: TypeError if it cannot be called, ValueError if its annotations are not Hook's.

    Annotations that are strings are not looked at.
    """
    if not callable(hook):
        raise TypeError(f"a communication hook must be callable, which {hook!r} is not")
    signature = inspect.signature(hook)
    said = {f"{p.name} annotation": p.annotation for p in signature.parameters.values() if p.name == "bucket"}
    said["return annotation"] = signature.return_annotation
    right = {"bucket annotation": dist.GradBucket, "return annotation": torch.futures.Future[torch.Tensor]}  # type: ignore[attr-defined]
    for what, annotation in said.items():
        if annotation not in (inspect.Signature.empty, right[what]) and not isinstance(annotation, str):
            raise ValueError(f"communication hook: the {what} must be {right[what]}, not {annotation}")


def result(future: Any) -> torch.Tensor:
    """Wait for what a communication hook has returned. RuntimeError if it is not a future of a tensor."""
    if not hasattr(future, "wait"):
        raise RuntimeError(f"communication hook: the callback must return a future, not {type(future).__name__}")
    value = future.wait()
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"the future of a communication hook must hold a Tensor, not {type(value).__name__}")
    return value


def buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters whose gradients are averaged together: by dtype and device, each sparse one alone."""
    found: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        sparse = p.grad is not None and p.grad.is_sparse
        found.setdefault(p if sparse else (p.dtype, p.device), []).append(p)
    return list(found.values())


class Bucket:
    """Gradients of some parameters in one vector: what communication hooks get, like torch.distributed.GradBucket."""

    def __init__(self, index: int, parameters: list[nn.Parameter], *, last: bool) -> None:
        self._index, self._parameters, self._last = index, parameters, last
        for p in parameters:
            if p.grad is None:  # another rank has used it
                p.grad = torch.zeros_like(p)
        self._grads = [local(p.grad) for p in parameters if p.grad is not None]
        if self._grads[0].is_sparse:
            self._buffer = self._grads[0].clone()
        else:
            self._buffer = torch.cat([gradient.reshape(-1) for gradient in self._grads])

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return, for each parameter, the part of the buffer that is its gradient, in its shape."""
        if self._buffer.is_sparse:
            return [self._buffer]
        parts = torch.split(self._buffer, [gradient.numel() for gradient in self._grads])
        return [part.view(gradient.shape) for part, gradient in zip(parts, self._grads, strict=True)]

    def give_back(self) -> None:
        """Copy the buffer into the parameters' gradients."""
        for gradient, mean in zip(self._grads, self.gradients(), strict=True):
            gradient.copy_(mean)
