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
    "torch.fx.experimental.validator",
    "torch.profiler._cupti_monitor",
    "sympy",
    "sympy.combinatorics",
    "sympy.tensor.tensor",
    # what compiling imports at its first use
    "torch._dynamo.backends.cudagraphs",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.backends.onnxrt",
    "torch._dynamo.backends.tensorrt",
    "torch._dynamo.backends.torchxla",
    "torch._dynamo.backends.tvm",
    "torch._dynamo.repro.after_dynamo",
    "torch._dynamo.dce_extra_outputs",
    "torch._export.db.logging",
    "torch._export.passes._node_metadata_hook",
    "torch._functorch._activation_checkpointing.remat_using_tags_for_fwd_loss_bwd_graph_pass",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.compiler_bisector",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel.ddp",
    "torch.distributed.tensor.debug",
    "torch.export._trace",
    "torch.export._unlift",
    # what suites use on ranks
    "pytest",
    "harness.oracles.tracing",
    "harness.programs.laws",
    "harness.stacks.collectives",
    "harness.stacks.dynamo",
    "harness.stacks.replicate",
    "harness.stacks.replicate_fsdp",
    "harness.stacks.tp_extension",
    "harness.stacks.tracing",
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
