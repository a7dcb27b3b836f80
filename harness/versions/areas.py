"""The areas of PyTorch in which defects are, by the names of the defects and the stacks of their tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.requirements import stack_of

COLLECTIVES, GROUPS, FUNCTIONAL = "Collectives", "Groups, meshes, stores", "Functional collectives"
DDP, FSDP2, FSDP1, PIPELINES = "DDP", "FSDP2", "FSDP1", "Pipelines"
TENSOR_PARALLEL, DTENSOR, STATES = "Tensor parallelism", "DTensor", "State dicts, checkpoints"
OPTIMIZERS, COMPILE, ACCELERATORS = "Optimizers, clipping", "torch.compile", "Accelerators"

AREAS: Mapping[str, str] = {
    COLLECTIVES: "collectives and messages of torch.distributed",
    GROUPS: "process groups, device meshes, stores, start and end",
    FUNCTIONAL: "functional and differentiable collectives, and their gradients",
    DDP: "DistributedDataParallel, composable replicate(), and their hooks",
    FSDP2: "fully_shard, replicate() on FSDP2, and composable checkpoint()",
    FSDP1: "FullyShardedDataParallel, also over tensor parallelism, and ShardedTensor",
    PIPELINES: "schedules and stages of torch.distributed.pipelining",
    TENSOR_PARALLEL: "parallelize_module, loss_parallel, input_reshard, context_parallel",
    DTENSOR: "DTensor and its operators",
    STATES: "torch.distributed.checkpoint, and state dicts of models and optimizers",
    OPTIMIZERS: "optimizers, gradient clipping and scaling",
    COMPILE: "torch.compile of distributed code",
    ACCELERATORS: "accelerators other than CUDA",
}
"""What each area is about, in the order in which they are shown."""

_OF_STACK: Mapping[str, str] = {
    "collectives": COLLECTIVES,
    "replicate": DDP,
    "replicate_fsdp": FSDP2,
    "tp_extension": FSDP1,
    "dynamo": COMPILE,
}
_BEGINNINGS: Mapping[str, Sequence[str]] = {
    ACCELERATORS: ("accelerator_",),
    FUNCTIONAL: ("functional_", "differentiable_"),
    DTENSOR: ("dtensor_", "debug_mode_"),
    COMPILE: ("compiled_",),
    FSDP2: ("checkpoint_backward_twice", "checkpoint_keyword", "checkpoint_other_hooks"),
    PIPELINES: ("pipeline_",),
    TENSOR_PARALLEL: (
        *("input_reshard_", "loss_parallel_", "context_parallel_", "prepared_"),
        *("tp_embedding_", "tp_empty_sequences", "tp_no_rows_", "tp_one_column", "tp_one_feature", "tp_plan_"),
        *("tp_sequence_", "tp_uneven_features", "tp_frozen_for_", "tp_arguments_", "tp_input_"),
    ),
    GROUPS: (
        *("local_group", "split_", "mesh_", "restart_", "init_", "destroyed_", "tensors_as_ranks", "not_a_member"),
        *("registered_", "group_of_", "changed_timeout", "nested_timers", "debug_level_", "elastic_error_"),
        *("prefix_", "memory_store_", "legacy_store_", "multi_set_", "store_", "file_store_", "python_store_"),
    ),
    OPTIMIZERS: (
        *("fused_", "sgd_", "zero_", "in_backward_", "distributed_adagrad", "post_local_", "averager_"),
        *("gradients_in_one_memory", "clip_", "scaler_"),
    ),
    STATES: (
        *("checkpoint_", "torch_save_", "full_", "flattened_", "loaded_", "stateless_", "states_of_", "state_dict_"),
        *("optimizer_state_", "broadcast_memory_formats", "broadcast_settings_", "shared_module_", "extra_state_"),
        *("frozen_second_name", "frozen_states_", "unexpected_key_", "offloaded_unknown_", "divided_group"),
        *("joined_groups", "empty_group_in_between", "replicate_prefix"),
    ),
}
"""How the names of defects begin, by area.  Every other defect is in the area of its test's stack."""


def area(defect: str, tests: Sequence[str]) -> str:
    """Return the area of a defect, one of :data:`AREAS`, by its id and the globs of its tests."""
    for name, beginnings in _BEGINNINGS.items():
        if defect.startswith(tuple(beginnings)):
            return name
    return _OF_STACK.get(stack_of(tests[0]) if tests else "", COLLECTIVES)
