"""Inductor's overlap scheduling: what the suites set of it, on ranks with and without an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch._dispatch.python import no_python_dispatcher
from torch.utils import _runtime_estimation

from harness.stacks.dynamo import inductor_options

__all__ = ["overlapping"]


@contextmanager
def overlapping(options: Mapping[str, Any], times: Callable[[str], float] | None = None) -> Iterator[None]:
    """Let Inductor move collectives over independent computation, in a context.

    Args:
        options: of ``torch._inductor.config.aten_distributed_optimizations``, by their names there.
        times: the milliseconds that an operator takes, by its name. A collective without data takes none, so that
            collectives in one bucket take as long as they do alone.

    An accelerator's speed, which Inductor asks Triton for, is 1 GB/s and 1 TFLOPS, so that ranks without one agree.
    """
    names = {"enable_overlap_scheduling": True, **options}
    if times is not None:
        names["custom_runtime_estimation"] = lambda node, size=None: times(str(node.target)) if size != 0 else 0.0
    chosen = {f"aten_distributed_optimizations.{name}": value for name, value in names.items()}
    with ExitStack() as stack:
        for name in ("get_gpu_dram_gbps", "get_device_dram_gbps", "get_device_tflops"):  # the second since 2.15
            if hasattr(_runtime_estimation, name):
                stack.enter_context(patch.object(_runtime_estimation, name, lambda *_, **__: 1))
        stack.enter_context(patch.object(dist, "all_gather_object", _gathered(dist.all_gather_object)))
        stack.enter_context(inductor_options(chosen))
        yield


def _gathered(gather: Callable[..., None]) -> Callable[..., None]:
    """Return a gather that Inductor can call while it compiles.

    The Python dispatcher calls gloo with the interpreter lock, for which gloo's thread may wait with a lock that gloo
    needs: they wait for each other now and then.
    """

    def outside(*arguments: Any, **options: Any) -> None:
        with no_python_dispatcher():
            gather(*arguments, **options)

    return outside
