"""Damages to the references, each with a test of the suites that must notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from harness.reference import replicate as ddp
from harness.reference import replicate_fsdp as fsdp
from harness.reference import tp_extension as tp
from suites.replicate.modules import test_application as ddp_application
from suites.replicate.modules import test_beginnings as ddp_beginnings
from suites.replicate.modules import test_calls as ddp_calls
from suites.replicate import test_corners as ddp_corners
from suites.replicate import test_gradients as ddp_gradients
from suites.replicate.hooks import test_hooks as ddp_hooks
from suites.replicate.modules import test_refusals as ddp_refusals
from suites.replicate.modules import test_selection as ddp_selection
from suites.replicate.reducer import test_static_graphs as ddp_static_graphs
from suites.replicate_fsdp.modules import test_application as fsdp_application
from suites.replicate_fsdp import test_corners as fsdp_corners
from suites.replicate_fsdp import test_gradients as fsdp_gradients
from suites.replicate_fsdp.modules import test_parameters as fsdp_parameters
from suites.replicate_fsdp.precision import test_precision as fsdp_precision
from suites.replicate_fsdp.modules import test_selection as fsdp_selection
from suites.replicate_fsdp.schedule import test_sync as fsdp_sync
from suites.tp_extension.extension import test_boxes as tp_boxes
from suites.tp_extension import test_corners as tp_corners
from suites.tp_extension.extension import test_extension as tp_extension


@dataclass(frozen=True)
class Damage:
    """What is changed in a reference, and a test that fails then."""

    stack: str
    put: Callable[[], None]
    test: Callable[..., None]
    arguments: dict[str, Any] = field(default_factory=dict)
    size: int = 2
    """Of the world that the test is for."""


def put(name: str) -> None:
    """Damage the reference in this process."""
    DAMAGES[name].put()


def replaced(owner: Any, name: str, new: Any) -> Callable[[], None]:
    """Puts something else into the place of a function."""
    return lambda: setattr(owner, name, new)


def around(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[], None]:
    """Puts ``change`` into the place of a function; it gets that function, and what that is called with."""
    old = getattr(owner, name)
    return lambda: setattr(owner, name, lambda *args, **kwargs: change(old, *args, **kwargs))


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a function that should have done something."""


def summed(old: Any, bucket: Any) -> None:
    bucket.set_buffer(bucket.buffer() * torch.distributed.get_world_size())
    old(bucket)


def always_synced(old: Any, replica: Any, *args: Any) -> Any:
    replica.requires_sync = True
    return old(replica, *args)


def without_hook(old: Any, of: Any) -> None:
    of.hook = None
    old(of)


def nothing_ignored(old: Any, replica: Any) -> None:
    replica.ignored = set()
    old(replica)


def buffers_kept(old: Any, replica: Any) -> list[torch.Tensor]:
    return []


def multiplied(old: Any, group: Any) -> None:
    group.divide_by = 1.0
    old(group)


def forgetting(old: Any, group: Any) -> None:
    if not (group.reduces and group.all_reduces):
        group.pending.clear()
    old(group)


def in_their_own_dtype(old: Any, group: Any, parameter: Any, plain: Any, gradient: torch.Tensor) -> None:
    before = group.pending.get(parameter)
    group.pending[parameter] = gradient if before is None else before + gradient


def uncast(dtype: Any, value: Any) -> Any:
    return value


def thawed(old: Any, extension: Any, tensor: torch.Tensor) -> Any:
    own, parameter = old(extension, tensor)
    return own.requires_grad_(), parameter


def of_equal_parts(own: torch.Tensor, mesh: Any, placements: Any, like: torch.Tensor) -> Any:
    return DTensor.from_local(own, mesh, placements, run_check=False)


def unmarked(old: Any, *args: Any) -> Any:
    found = old(*args)
    found._fsdp_flattened = False
    return found


def all_gathered(extension: Any, tensor: Any, parent_mesh: Any) -> torch.Tensor:
    return tensor.full_tensor()


def outer_loaded(extension: Any, tensor: Any) -> Any:
    return tensor, tensor.local_shards()


def whole_saved(old: Any, *args: Any) -> Any:
    found = old(*args)
    return found.redistribute(placements=[Replicate()] * (found.device_mesh.ndim - 1) + [found.placements[-1]])


def ranks_of_group(size: Any, dim: int, ranks: Any, device: Any, old: Any = tp.boxes) -> Any:
    found = old(size, dim, ranks, device)
    for i, shard in enumerate(found):
        found[i] = type(shard)(shard.shard_offsets, shard.shard_sizes, tp.at(i, device))
    return found


def of_one_size(old: Any, size: Any, *args: Any) -> Any:
    found = old(size, *args)
    found[-1].shard_sizes = found[0].shard_sizes
    return found


DAMAGES = {
    "replicate-sums": Damage(
        "replicate",
        around(ddp.Bucket, "give_back", summed),
        ddp_gradients.test_gradients_are_those_of_the_whole_batch,
    ),
    "replicate-parameters-not-sent": Damage(
        "replicate",
        replaced(ddp.Replica, "send", nothing),
        ddp_beginnings.test_parameters_of_rank_0,
        {"how": "replicate"},
    ),
    "replicate-buffers-not-sent": Damage(
        "replicate",
        around(ddp.Replica, "buffers", buffers_kept),
        ddp_corners.test_buffers,
        {"options": {}},
    ),
    "replicate-always-synced": Damage(
        "replicate",
        around(ddp.Replica, "before_forward", always_synced),
        ddp_calls.test_sync_of_one_module,
    ),
    "replicate-nothing-ignored": Damage(
        "replicate",
        around(ddp.Replica, "begin", nothing_ignored),
        ddp_selection.test_ignored,
        {"ignored": "outer"},
    ),
    "replicate-hook-not-called": Damage(
        "replicate",
        around(ddp.Replica, "average", without_hook),
        ddp_hooks.test_state_and_result,
        {"how": "positions"},
    ),
    "replicate-copied": Damage(
        "replicate",
        lambda: delattr(ddp.DDP, "__deepcopy__"),
        ddp_application.test_refused,
        {"case": "deepcopy"},
        size=1,
    ),
    "replicate-shapes-not-compared": Damage(
        "replicate",
        replaced(ddp.Replica, "require_equal_shapes", nothing),
        ddp_beginnings.test_other_shapes_are_refused,
        {"differing": "shape"},
    ),
    "replicate-hook-not-checked": Damage(
        "replicate",
        replaced(ddp, "require_hook", nothing),
        ddp_hooks.test_wrong_hooks,
    ),
    "replicate-everything-supported": Damage(
        "replicate",
        replaced(ddp, "require_supported", nothing),
        ddp_refusals.test_refused_by_ddp,
        size=1,
    ),
    "replicate-graph-may-change": Damage(
        "replicate",
        replaced(ddp.Replica, "require_same_graph", nothing),
        ddp_static_graphs.test_changes,
    ),
    "fsdp-sums": Damage(
        "replicate_fsdp",
        around(fsdp.Group, "average", multiplied),
        fsdp_gradients.test_gradients_are_those_of_the_whole_batch,
    ),
    "fsdp-pending-forgotten": Damage(
        "replicate_fsdp",
        around(fsdp.Group, "average", forgetting),
        fsdp_sync.test_requires_all_reduce,
    ),
    "fsdp-hook-not-called": Damage(
        "replicate_fsdp",
        around(fsdp.Group, "average", without_hook),
        fsdp_sync.test_all_reduce_hook,
    ),
    "fsdp-added-in-their-own-dtype": Damage(
        "replicate_fsdp",
        around(fsdp.Group, "add", in_their_own_dtype),
        fsdp_precision.test_accumulated_in_reduce_dtype,
    ),
    "fsdp-inputs-not-cast": Damage(
        "replicate_fsdp",
        replaced(fsdp, "cast", uncast),
        fsdp_precision.test_what_is_cast,
        {"inputs": True, "output": ""},
    ),
    "fsdp-stays-plain": Damage(
        "replicate_fsdp",
        replaced(fsdp.Group, "reshard", nothing),
        fsdp_parameters.test_placements,
    ),
    "fsdp-shared-parameters-taken": Damage(
        "replicate_fsdp",
        replaced(fsdp, "local", lambda tensor: tensor.to_local().clone()),
        fsdp_corners.test_tied_across_groups,
    ),
    "fsdp-copied": Damage(
        "replicate_fsdp",
        lambda: delattr(fsdp.ReplicateModule, "__deepcopy__"),
        fsdp_application.test_refused,
        {"case": "deepcopy"},
        size=1,
    ),
    "fsdp-only-one-layer-of-modules": Damage(
        "replicate_fsdp",
        replaced(fsdp, "managed", lambda module: [module]),
        fsdp_selection.test_ignored,
        {"ignored": "first"},
    ),
    "tp-frozen-trained": Damage(
        "tp_extension",
        around(tp.DTensorExtensions, "pre_flatten_transform", thawed),
        tp_corners.test_frozen,
        {"parallel": True},
    ),
    "tp-size-forgotten": Damage(
        "tp_extension",
        replaced(tp, "laid", of_equal_parts),
        tp_corners.test_sharded_state,
        {"features": 5},
        size=4,
    ),
    "tp-gradient-not-waited-for": Damage(
        "tp_extension",
        replaced(tp.DTensorExtensions, "arrived", lambda extension, gradient: gradient),
        tp_extension.test_gradient_is_waited_for,
    ),
    "tp-not-marked": Damage(
        "tp_extension",
        around(tp.DTensorExtensions, "post_unflatten_transform", unmarked),
        tp_extension.test_marked_and_not_compiled,
        size=1,
    ),
    "tp-saved-whole": Damage(
        "tp_extension",
        around(tp.DTensorExtensions, "chunk_dtensor", whole_saved),
        tp_extension.test_chunks,
    ),
    "tp-gathered-beyond-fsdp": Damage(
        "tp_extension",
        replaced(tp.DTensorExtensions, "all_gather_dtensor", all_gathered),
        tp_extension.test_gathering,
        size=4,
    ),
    "tp-outer-loaded": Damage(
        "tp_extension",
        replaced(tp.DTensorExtensions, "pre_load_state_dict_transform", outer_loaded),
        tp_extension.test_nested_sharded_tensor,
        {"placement": Shard(0)},
    ),
    "tp-boxes-of-one-size": Damage(
        "tp_extension",
        around(tp, "boxes", of_one_size),
        tp_boxes.test_parameters,
        {"ranks": "first", "size": (5, 7)},
        size=1,
    ),
    "tp-ranks-of-the-group": Damage(
        "tp_extension",
        replaced(tp, "boxes", ranks_of_group),
        tp_boxes.test_local_ranks,
        {"ranks": "others"},
        size=1,
    ),
}
