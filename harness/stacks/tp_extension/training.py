"""FSDP1 over tensor parallelism in programs, with torch alone: put a model on ranks, and read what is in it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from harness.stacks.training import Handle, Party, Tensors, dtype_of, plain, whole


class Fsdp1(Handle):
    """Access to what is in FSDP1's flat parameters."""

    def set_sync(self, model: nn.Module, synced: bool) -> None:
        modules: Iterable[Any] = model.modules()
        for module in modules:
            if hasattr(module, "_sync_gradients"):
                module._sync_gradients = synced

    def clip(self, model: Any, most: float) -> torch.Tensor:
        norm: torch.Tensor = model.clip_grad_norm_(most)
        return norm

    def gradients(self, model: Any) -> Tensors:
        if not model._use_orig_params:
            return {}
        with FullyShardedDataParallel.summon_full_params(model, writeback=False, with_grads=True):
            return {plain(n): whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}

    def parameters(self, model: nn.Module) -> Tensors:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {plain(n): whole(p).clone() for n, p in model.named_parameters()}

    def states(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensors]:
        return {}  # states are those of flat parameters

    def forget(self, model: nn.Module) -> None:
        modules: Iterable[Any] = model.modules()
        for module in modules:
            if getattr(module, "_handle", None) is not None and module._handle.uses_sharded_strategy:
                _reshard(module, module._handle, free_unsharded_flat_param=True)

    def close(self, model: nn.Module) -> None:
        """Break the reference cycles of flat parameters, which the garbage collector does not see.

        These cycles are a defect (docs/findings/tp_memory.py), and would hide anything else that is kept.
        """
        modules: Iterable[Any] = model.modules()
        for module in modules:
            if getattr(module, "_handle", None) is not None:
                vars(module._handle.flat_param).clear()

    @contextlib.contextmanager
    def saving(self, model: nn.Module) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                yield

    def optimizer_state_dict(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return FullyShardedDataParallel.optim_state_dict(model, optimizer)

    def load_optimizer_state_dict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))


def on_tp_extension(
    party: Party,
    model: nn.Module,
    wrapped: Sequence[str],
    *,
    tensor: int,
    plan: Mapping[str, str],
    use_orig_params: bool = True,
    strategy: str = "FULL_SHARD",
    replicas: int = 0,
    param_dtype: str = "",
    reduce_dtype: str = "",
) -> nn.Module:
    """Put a model on ranks with FSDP1 over tensor parallelism.

    ``plan``: ``columns`` or ``rows`` for each tensor-parallel layer, while the others stay whole; ``replicas``: the
    number of replicas of the shards for hybrid strategies, on a mesh of three dimensions; 0 for a mesh of two.
    """
    data = party.world // tensor
    sizes: tuple[int, ...] = (replicas, data // replicas, tensor) if replicas else (data, tensor)
    names: tuple[str, ...] = ("replicas", "shards", "tp") if replicas else ("dp", "tp")
    mesh = init_device_mesh(party.device.type, sizes, mesh_dim_names=names)
    styles: dict[str, ParallelStyle] = {
        name: ColwiseParallel(output_layouts=Replicate())
        if how == "columns"
        else RowwiseParallel(input_layouts=Replicate())
        for name, how in plan.items()
    }
    parallelize_module(model, mesh["tp"], styles)
    options: dict[str, Any] = {
        "device_mesh": mesh["replicas", "shards"] if replicas else mesh["dp"],
        "device_id": party.device,
        "use_orig_params": use_orig_params,
        "sharding_strategy": ShardingStrategy[strategy],
    }
    if param_dtype or reduce_dtype:
        options["mixed_precision"] = MixedPrecision(
            dtype_of(param_dtype), dtype_of(reduce_dtype), dtype_of(param_dtype)
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        warnings.filterwarnings("ignore", category=FutureWarning)
        for name in wrapped:
            above, _, last = name.rpartition(".")
            parent = model.get_submodule(above)
            setattr(parent, last, FullyShardedDataParallel(parent.get_submodule(last), **options))
        party.model = FullyShardedDataParallel(model, **options)
    party.handle = Fsdp1()
    return party.model


__all__ = ["Fsdp1", "on_tp_extension"]
