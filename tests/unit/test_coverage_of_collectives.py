"""Every public collective of torch.distributed has a requirement that names it, or a reason here why it has none."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch.distributed.distributed_c10d as c10d
import torch.distributed.nn.functional as differentiable

from harness.stacks.collectives import functional

SUITE = Path(__file__).parents[2] / "suites" / "collectives"

NO_COLLECTIVE = {
    "a type, a constant or options": (
        "AllToAllOptions AllreduceCoalescedOptions AllreduceOptions BarrierOptions"
        " BroadcastOptions DebugLevel GatherOptions GroupMember GroupName"
        " ReduceOptions ReduceScatterOptions ScatterOptions default_pg_timeout group"
        " ProcessGroupMPI ProcessGroupNCCL ProcessGroupUCC ProcessGroupXCCL"
    ),
    "says what there is, and sends nothing": (
        "get_pg_count is_gloo_available is_initialized is_mpi_available is_nccl_available"
        " is_ucc_available is_xccl_available"
    ),
}
NO_FUNCTIONAL_COLLECTIVE = {
    "what autograd calls; the gradient has a requirement": (
        "wait_tensor_backward wait_tensor_setup_context all_reduce_backward all_reduce_setup_context"
        " all_gather_into_tensor_backward all_gather_into_tensor_setup_context reduce_scatter_tensor_backward"
        " reduce_scatter_tensor_setup_context all_to_all_single_backward all_to_all_single_setup_context"
        " all_reduce_coalesced_backward all_reduce_coalesced_setup_context all_gather_into_tensor_coalesced_backward"
        " all_gather_into_tensor_coalesced_setup_context reduce_scatter_tensor_coalesced_backward"
        " reduce_scatter_tensor_coalesced_setup_context"
    ),
    "a switch for compiled graphs": "allow_inflight_collective_as_graph_input_ctx",
}


def sources() -> set[str]:
    """Every name in a source of a requirement of the suite; of ``torch.distributed.X`` it is ``X``."""
    found: set[str] = set()
    for file in SUITE.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "requirement":
                (text,) = [ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg == "source"]
                found |= set(re.findall(r"\w+", text))
    return found


def reasons(listed: dict[str, str]) -> set[str]:
    return {name for names in listed.values() for name in names.split()}


def functions_of(module: object) -> set[str]:
    """Public functions that are defined in a module."""
    name = getattr(module, "__name__", "")
    members = inspect.getmembers(module, inspect.isfunction)
    return {key for key, value in members if not key.startswith("_") and value.__module__ == name}


def test_public_collectives() -> None:
    """What torch.distributed exports is in the source of a requirement, or is no collective."""
    assert set(c10d.__all__) - sources() - reasons(NO_COLLECTIVE) == set()


def test_functional_collectives() -> None:
    """So are the functional collectives."""
    assert functions_of(functional) - sources() - reasons(NO_FUNCTIONAL_COLLECTIVE) == set()


def test_differentiable_collectives() -> None:
    """So are the differentiable ones."""
    assert functions_of(differentiable) - sources() == set()


@pytest.mark.parametrize("listed", [NO_COLLECTIVE, NO_FUNCTIONAL_COLLECTIVE], ids=["plain", "functional"])
def test_no_reason_is_left_over(listed: dict[str, str]) -> None:
    """What has a requirement needs no reason."""
    assert reasons(listed) & sources() - {"ReduceOp", "group"} == set()  # which are words as well
