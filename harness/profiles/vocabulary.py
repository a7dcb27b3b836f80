"""The words of claims: collectives, dtypes, reductions, and the features of each stack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FORK, SPAWN = STARTS = ("fork", "spawn")
"""How a rank's process begins: as a fork of a process that has imported torch, or as a new Python."""

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
"""Collectives that have a reduction."""

COLLECTIVES = (
    *REDUCING,
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
)

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
)
"""As torch names them."""

OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR", "PREMUL_SUM")
"""As torch.distributed.ReduceOp names them."""

BOUNDED = ("float64", "float32", "float16", "bfloat16")
"""The dtypes for which rounding is bounded (docs/tolerances.md)."""

KINDS = {
    "wrong": "values, metadata or states are silently wrong",
    "hang": "ranks wait for each other, or far longer than they should",
    "crash": "a process ends",
    "error": "raises where it should work",
    "accepts": "raises no error where one is promised",
    "cost": "takes memory, messages or compilations that it should not",
}
"""The kinds of known defects, worst first.  A defect that shows in several ways has the worst kind of them."""


@dataclass(frozen=True)
class Feature:
    """A part of a stack that a backend or a device need not support."""

    meaning: str
    topics: tuple[str, ...]
    """Requirements that need it: a whole id, or the beginning of ids up to a hyphen."""
    of_accelerators: bool = False
    """Whether the host can't have it."""

    def concerns(self, requirement: str) -> bool:
        """Return whether the requirement with this id needs it."""
        return any(requirement == topic or requirement.startswith(f"{topic}-") for topic in self.topics)


FEATURES: Mapping[str, Mapping[str, Feature]] = {
    "collectives": {
        "any_source": Feature("messages from any rank", ("COLL-P2P-02", "COLL-P2P-09", "COLL-P2P-16", "COLL-GROUP-32")),
        "async": Feature("works that are waited for later", ("COLL-ASYNC", "COLL-PAIR")),
        "coalescing": Feature("collectives that are issued together", ("COLL-COALESCED",)),
        "functional": Feature(
            "functional collectives", ("COLL-FUNC", "COLL-CROSS-05", "COLL-FREE-02", "COLL-GRAD-02", "COLL-GRAD-04")
        ),
        "gradients": Feature("collectives that autograd knows", ("COLL-GRAD", "COLL-GROUP-07", "COLL-FUNC-07")),
        "meshes": Feature("groups of device meshes", ("COLL-MESH",)),
        "messages": Feature("send and recv, batches of them", ("COLL-P2P", "COLL-ASYNC-05", "COLL-ASYNC-10")),
        "mismatches": Feature("an error if ranks give tensors of different sizes or dtypes", ("COLL-MISUSE-02",)),
        "monitored_barrier": Feature("a barrier that names who is missing", ("COLL-BARRIER-03", "COLL-BARRIER-04")),
        "objects": Feature("collectives of Python objects", ("COLL-OBJECT",)),
        "restarts": Feature("groups that are destroyed and made again", ("COLL-LIFE",)),
        "splitting": Feature("split_group and shrink_group", ("COLL-GROUP-08", "COLL-GROUP-09")),
        "streams": Feature("the order of a device's streams", ("COLL-STREAM",), of_accelerators=True),
        "strided": Feature(
            "tensors that are not contiguous",
            ("COLL-LAYOUT", "COLL-CROSS-02", "COLL-CROSS-03", "COLL-CROSS-04", "COLL-P2P-07", "COLL-FUNC-02")
            + ("COLL-FUNC-03", "COLL-GRAD-05"),
        ),
        "subgroups": Feature(
            "groups of some ranks", ("COLL-GROUP", "COLL-CROSS-06", "COLL-SIZE-04", "COLL-BARRIER-05", "COLL-OBJECT-09")
        ),
        "tags": Feature(
            "messages that are matched by their tags",
            ("COLL-P2P-03", "COLL-P2P-10", "COLL-P2P-14", "COLL-P2P-15", "COLL-P2P-16"),
        ),
        "threads": Feature("collectives from several threads", ("COLL-THREAD",)),
        "timeouts": Feature(
            "a limit for how long a collective waits",
            ("COLL-TIMEOUT-01", "COLL-TIMEOUT-02", "COLL-TIMEOUT-03", "COLL-TIMEOUT-04", "COLL-TIMEOUT-05"),
        ),
    },
    "replicate": {
        "buffers": Feature("buffers that are sent to every rank", ("DDP-BUF", "DDP-INIT-02", "REPL-BUF")),
        "comm_hooks": Feature("communication hooks", ("REPL-HOOK",)),
        "mixed_precision": Feature("DDP's mixed precision", ("REPL-MP",)),
        "sparse_gradients": Feature("sparse gradients", ("REPL-PAR-02", "REPL-HOOK-29")),
        "static_graph": Feature("static_graph", ("REPL-STATIC",)),
        "streams": Feature("training on another than the default stream", ("REPL-STREAM",), of_accelerators=True),
        "unused_parameters": Feature("find_unused_parameters", ("REPL-UNUSED",)),
    },
    "replicate_fsdp": {
        "hooks": Feature("hooks of gradients and of all-reduces", ("RFSDP-HOOK",)),
        "meta": Feature("models that are made on the meta device", ("RFSDP-META",)),
        "mixed_precision": Feature("MixedPrecisionPolicy", ("RFSDP-MIX", "RFSDP-CAST", "RFSDP-ACC-02")),
        "streams": Feature("training on another than the default stream", ("RFSDP-STREAM",), of_accelerators=True),
        "tensor_parallel": Feature("tensor-parallel layers in replicated models", ("RFSDP-TP", "RFSDP-MESH-02")),
    },
    "tp_extension": {
        "hybrid": Feature("replicas of shards", ("TP-HYB", "TP-STATE-10")),
        "sharded_tensors": Feature("ShardedTensor", ("TP-BOX", "TP-EXT-06", "TP-EXT-07", "TP-TENSOR")),
        "state_dicts": Feature("state dicts of models and optimizers", ("TP-STATE",)),
        "streams": Feature("streams of the device", ("TP-EXT-08",)),
    },
    "dynamo": {
        "agreement": Feature("ranks that agree on what they compile", ("DYN-AGREE",)),
        "collectives": Feature("compiled collectives", ("DYN-COLL",)),
        "ddp": Feature("compiled models under DDP", ("DYN-DDP",)),
        "dtensors": Feature("compiled DTensors", ("DYN-DT",)),
        "inductor": Feature("code that Inductor makes", ("DYN-GRAD-04",)),
        "messages": Feature("compiled messages", ("DYN-P2P",)),
        "tags": Feature("compiled messages that are matched by their tags", ("DYN-P2P-03", "DYN-FORM-13")),
    },
}
"""Features by stack and name."""

STACKS = tuple(FEATURES)


def features_of(stack: str, requirements: Iterable[str]) -> list[str]:
    """Return the features of a stack that any of the requirements needs, in the order of :data:`FEATURES`."""
    ids = list(requirements)
    known = FEATURES.get(stack, {})
    return [name for name, feature in known.items() if any(feature.concerns(each) for each in ids)]
