"""Which requirements have no test that runs: all of theirs are waived, or not supported."""

from __future__ import annotations

import torch

from harness.plugin.claims import torch_has
from harness.plugin.waivers import Conditions
from harness.profiles import Platform, Profile
from harness.suite_facts import SuiteFacts, TestFacts

HOST = Platform(torch=torch.__version__, python="3.11", machine="x86_64", os="Linux 6.8.0", device_name="cpu")
NONE_LIVE = {
    "COLL-ALLGATHER-04": "gloo refuses every size that differs",
    "COLL-ALLGATHER-05": "gloo refuses every stacked output",
    "COLL-ASYNC-05": "gloo waits for every message again",
    "COLL-FUNC-08": "gloo refuses every complex tensor in this form",
    "COLL-GATHER-02": "gloo refuses every complex tensor in gather",
    "COLL-MISUSE-02": "gloo notices no mismatch of all_gather and reduce, or of smaller tensors, either",
    "COLL-REDUCESCATTER-04": "gloo refuses every stacked input",
    "COLL-VALUE-05": "on gloo it depends on the rank for every collective and every operation",
    "DDP-CKPT-03": "a part of every such gradient is averaged",
    "DDP-REFUSE-02": "every such hook is a segmentation fault",
    "DYN-AGREE-02": "compiler collectives fail in their first message",
    "DYN-CONST-02": "compiled code is never guarded by a group",
    "REPL-APPLY-06": "the parameters are lost in the first forward",
    "REPL-APPLY-08": "every slice is uninitialized",
    "REPL-BUF-01": "buffers are never broadcast",
    "REPL-GRAPH-01": "the second such gradient is refused",
    "REPL-HOOK-05": "a late hook is never called",
    "REPL-HOOK-14": "the first backward with either hook fails",
    "REPL-MP-01": "parameters are cast to no dtype",
    "REPL-STATIC-06": "nothing is averaged after such a step",
    "REPL-UNUSED-03": "a backward that reaches no parameter never averages",
    "RFSDP-COMPILED-01": "no parameter is resharded, so that optimizers have no gradient",
    "RFSDP-DIM-01": "the backward fails, whatever else the group has",
    "RFSDP-OUT-03": "no kind of hidden output is found",
    "TP-EXT-10": "there is one way to import a module",
    "TP-GRAD-09": "every model with such a shard fails",
    "TP-MEM-01": "the memory stays even if nothing was trained",
    "TP-OP-41": "there is no rule for the backward; that of replicas with a weight and a bias is a decomposition",
}
"""Requirements without a live test on gloo on the host, each with the reason: none of it works with torch 2.13."""


def without_live_test(facts: SuiteFacts, profile: Profile, conditions: Conditions) -> list[str]:
    """Return the requirements with a waived test, all of whose other tests are waived or unsupported, too."""
    states: dict[str, set[str]] = {}
    for nodeid, test in facts.tests.items():
        state = _state(nodeid, test, profile, conditions)
        for requirement in test.requirements:
            states.setdefault(requirement, set()).add(state)
    return sorted(name for name, found in states.items() if "waived" in found and "live" not in found)


def _state(nodeid: str, test: TestFacts, profile: Profile, conditions: Conditions) -> str:
    if test.needs.unclaimed(profile.claims.on(HOST)) or (test.needs.torch and not torch_has(test.needs.torch)):
        return "unsupported"
    return "waived" if conditions.concerning(profile, nodeid) else "live"
