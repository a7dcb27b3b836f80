"""The modules that the server imports before it forks ranks."""

from __future__ import annotations

from collections.abc import Mapping

PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.parallel.fsdp",
    "torch.distributed._composable.replicate",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.nn.parallel.distributed",
    "torch._dynamo",
    "torch._dynamo.convert_frame",
    "torch._dynamo.backends.registry",
    "torch._dynamo.testing",
    "torch._functorch.aot_autograd",
    "torch._functorch.compilers",
    "torch._inductor.compile_fx",
    "functorch.compile",
    "torch.fx.experimental.symbolic_shapes",
    "torch.profiler._cupti_monitor",
    "sympy",
)
"""Modules that the server imports once, so that no rank has to; modules that a PyTorch does not have are skipped."""

_OF_RANKS = (
    "cloudpickle",
    "_pytest.assertion",
    "_pytest._code",
    "harness.worlds.rank",
    "harness.worlds.recorder",
    "harness.oracles.exact",
)
"""Imported in the server in any case."""

PRELOAD_VARIABLE = "CONCORD_PRELOAD"
"""The environment variable that replaces :data:`PRELOAD`: names of modules, with commas between them."""


def preload_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the modules that the server imports: those that ``CONCORD_PRELOAD`` names, or :data:`PRELOAD`."""
    names = tuple(name.strip() for name in environment.get(PRELOAD_VARIABLE, "").split(",") if name.strip())
    return (names or PRELOAD) + _OF_RANKS
