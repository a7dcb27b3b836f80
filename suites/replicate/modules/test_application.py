"""Applying composable DDP to a module: its arguments, its errors, and the replicated module."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import alone, layers, row, train
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import messages
from harness.stacks.collectives import flattened
from harness.stacks.replicate import DDP, replicate

SOURCE = "torch/distributed/_composable/replicate.py: replicate"


REFUSED: dict[str, tuple[Callable[[nn.Module], object], type[Exception], str]] = {
    "device-as-text": (lambda model: replicate(model, device_id="cpu"), RuntimeError, "device_id"),
    "device-as-none": (lambda model: replicate(model, device_id=None), RuntimeError, "device_id"),
    "device-as-float": (lambda model: replicate(model, device_id=0.0), RuntimeError, "device_id"),
    "fully-sharded": (lambda model: replicate(fully_shard(model)), RuntimeError, "fully_shard"),
    "twice": (lambda model: replicate(replicate(model)), Exception, ""),
    "deepcopy": (lambda model: copy.deepcopy(replicate(model)), AssertionError, "deepcopy"),
}


@requirement(
    "REPL-APPLY-01",
    "replicate() raises an error that names the problem for a wrong device, an already distributed module, or a "
    "deepcopy.",
    source=SOURCE,
)
@pytest.mark.parametrize("case", list(REFUSED))
@pytest.mark.world(1)
def test_refused(world: World, case: str) -> None:
    """Pass an invalid device or another stack's module, replicate twice, or copy."""
    refused, kind, word = REFUSED[case]

    def body(rank: Rank) -> str:
        try:
            refused(layers().to(rank.device))
        except kind as e:
            return "" if word in str(e) else f"{type(e).__name__}: {e}"
        return "no error"

    assert_on_ranks([""], world.run(body))


@requirement(
    "REPL-APPLY-02",
    "A replicated module is an instance of both its own class and DDP.",
    source=SOURCE,
)
@requirement(
    "REPL-APPLY-11",
    "The layers and parameters of a replicated module keep their names.",
    source=SOURCE,
)
@pytest.mark.world(1)
def test_class(world: World) -> None:
    """Replicate a container of two layers."""

    def body(rank: Rank) -> list[Any]:
        model = replicate(layers())
        return [
            type(model).__name__,
            isinstance(model, DDP) and isinstance(model, nn.Sequential),
            [name for name, _ in model.named_parameters()],
            type(model[0]).__name__,  # type: ignore[index]
        ]

    assert_on_ranks([["DDPSequential", True, ["0.weight", "1.weight"], "Linear"]], world.run(body))


@requirement(
    "REPL-APPLY-08",
    "Slicing a replicated container gives a container of the original class that is not replicated.",
    source="torch/distributed/_composable/replicate.py: DDP.__new__",
)
@pytest.mark.parametrize("kind", [nn.Sequential, nn.ModuleList])
@pytest.mark.world(1)
def test_slice(world: World, kind: type[nn.Module]) -> None:
    """Take the first of two layers."""

    def body(rank: Rank) -> list[Any]:
        part = replicate(kind(*layers()) if kind is nn.Sequential else kind(layers()))[:1]  # type: ignore[arg-type,index]
        return [type(part).__name__, [name for name, _ in part.named_parameters()]]

    assert_on_ranks([[kind.__name__, ["0.weight"]]], world.run(body))


@requirement(
    "REPL-APPLY-03",
    "Gradients are averaged over all ranks, however device_id names the module's device.",
    source=SOURCE,
)
@pytest.mark.parametrize("said", ["as-device", "as-number", "not-at-all"])
@pytest.mark.world(2, 4)
def test_device(world: World, said: str) -> None:
    """Pass device_id as a torch.device, as an index if the device has one, or not at all."""

    def body(rank: Rank) -> list[list[float]]:
        number = rank.device if rank.device.index is None else rank.device.index
        options = {"as-device": {"device_id": rank.device}, "as-number": {"device_id": number}, "not-at-all": {}}
        return train(replicate(layers().to(rank.device), **options[said]), rank.index)

    assert_on_ranks([alone(world.size)] * world.size, world.run(body))


class Used(nn.Module):
    """Two layers of which a forward uses the first, or both."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(2, 2, bias=False) for _ in range(2))
        for layer in (self.first, self.second):
            nn.init.constant_(layer.weight, 1.0 + rank)

    def forward(self, x: torch.Tensor, both: bool = True) -> torch.Tensor:
        result: torch.Tensor = self.first(x) + self.second(x) if both else self.first(x)
        return result


@requirement(
    "REPL-APPLY-14",
    "Every other option of replicate() has the same effect with a device_id as without one.",
    source=f"{SOURCE}: device_id, kwargs",
)
@pytest.mark.usefixtures("with_buckets")
@pytest.mark.parametrize("said", ["as-device", "as-number", "not-at-all"])
@pytest.mark.world(2)
def test_options_beside_device(world: World, said: str) -> None:
    """Each option is given alone with a device_id, as the rank's group and mesh alone, and shows in three steps."""

    def body(rank: Rank) -> None:
        number = rank.device if rank.device.index is None else rank.device.index
        named = {"as-device": {"device_id": rank.device}, "as-number": {"device_id": number}, "not-at-all": {}}[said]
        own, mean = 1.0 + rank.index, 1.5
        alone_group = [rank.subgroup([0]), rank.subgroup([1])][rank.index]
        alone_mesh = rank.mesh(2, 1, names=("apart", "alone"))["alone"]
        every: list[tuple[dict[str, Any], float, bool]] = [
            ({}, mean, True),
            ({"process_group": alone_group}, own, True),
            ({"device_mesh": alone_mesh}, own, True),
            ({"find_unused_parameters": True}, mean, False),
            ({"static_graph": True}, mean, False),
            ({"gradient_as_bucket_view": True}, mean, True),
            ({"bucket_cap_mb": 1e-6}, mean, True),
            ({"init_sync": False}, mean, True),
            ({"ignored_modules": []}, mean, True),
        ]
        for options, right, both in every:
            model: Any = replicate(Used(rank.index).to(rank.device), **named, **options)
            for _ in range(3):
                before = messages.mark()
                model(torch.full((1, 2), own, device=rank.device), both).sum().backward()
                first, second = (layer.weight.grad for layer in model.children())
                assert first.flatten().tolist() == [right] * 4, options
                assert second.tolist() == first.tolist() if both else second is None or not second.any(), options
                reduced = [m for m in messages.since(before) if m.op.endswith("all_reduce") and m.dtype == "Float"]
                shared = both and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
                assert shared == ("gradient_as_bucket_view" in options), options
                model.zero_grad()
            if messages.since(before):
                assert len(reduced) == (2 if "bucket_cap_mb" in options else 1), options
            kept = own if right == own or "init_sync" in options else 1.0
            assert model.first.weight.flatten().tolist() == [kept] * 4, options

    world.run(body)


@requirement(
    "REPL-APPLY-13",
    "With device_id, a replicated model moves tensors on the host, in any argument or container, to its device.",
    source="torch/distributed/_composable/replicate.py: device_id; DistributedDataParallel: device_ids",
)
@pytest.mark.world(1, 2)
def test_inputs_on_the_host(world: World) -> None:
    """Pass tensors of the host by position, by keyword, in a list and in a dict."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, xs: list[Any], *, named: torch.Tensor, by: dict[str, Any]) -> list[Any]:
            given = (x, xs[1], named, by["y"])
            return [str(each.device) for each in given] + [sum(self.weight * each.to(self.weight) for each in given)]

    def body(rank: Rank) -> tuple[bool, list[float]]:
        model = Model().to(rank.device)
        home = model.weight.device
        replicate(model, device_id=home)
        tensor = torch.full((2,), 1.0 + rank.index)
        *places, output = model(tensor, [3, tensor.clone()], named=tensor.clone(), by={"y": tensor.clone()})
        output.sum().backward()
        assert model.weight.grad is not None
        return places == [str(home)] * 4, model.weight.grad.tolist()

    gradient = [4 * (world.size + 1) / 2] * 2
    assert_on_ranks([(True, gradient)] * world.size, world.run(body))


@requirement(
    "REPL-APPLY-10",
    "A device_id other than the module's device raises an error in the first forward that names the device.",
    source=SOURCE,
)
@pytest.mark.parametrize("said", ["index", "device"])
@pytest.mark.world(1)
def test_other_device(world: World, said: str) -> None:
    """Pass the first device of an accelerator for a module on the host."""
    given = {"index": 0, "device": torch.device("cuda", 0)}[said]

    def body(rank: Rank) -> str:
        model = replicate(layers(), device_id=given)
        with pytest.raises(ValueError, match=r"device_ids.*0") as e:
            model(row(0))
        return str(e.value)

    assert "cpu" in world.run(body)[0]


@requirement(
    "REPL-APPLY-04",
    "replicate() skips a layer that fully_shard manages, and all layers have averaged gradients.",
    source=SOURCE,
)
@pytest.mark.parametrize("which", ["0", "1"])
@pytest.mark.world(2)
def test_sharded_inside(world: World, which: str) -> None:
    """Shard the first or the second layer, and compare each rank's shard of its gradient: the half of its rows."""

    def body(rank: Rank) -> list[list[float]]:
        model = layers().to(rank.device)
        fully_shard(model.get_submodule(which))
        replicate(model)
        model(row(rank.index).to(rank.device)).sum().backward()
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        assert [isinstance(gradient, DTensor) for gradient in gradients] == [which == "0", which == "1"]
        return [(g.to_local() if isinstance(g, DTensor) else g).flatten().tolist() for g in gradients]

    expected = [alone(2) for _ in range(2)]
    for rank, gradients in enumerate(expected):
        whole = gradients[int(which)]
        gradients[int(which)] = whole[len(whole) // 2 * rank :][: len(whole) // 2]
    assert_on_ranks(expected, world.run(body))


@requirement(
    "REPL-APPLY-05",
    "Ignored modules are skipped with everything in them: their gradients stay local to the rank.",
    source=SOURCE,
)
@pytest.mark.parametrize("nested", [False, True], ids=["a-layer", "a-container"])
@pytest.mark.world(2)
def test_ignored(world: World, nested: bool) -> None:
    """Ignore a layer, or a container with a layer."""

    def body(rank: Rank) -> list[list[float]]:
        model = layers()
        if nested:
            model[0] = nn.Sequential(model[0])
        model.to(rank.device)
        return train(replicate(model, ignored_modules=[model[0]]), rank.index)

    own = []
    for part in range(2):
        model = layers()
        model(row(part)).sum().backward()
        own.append([p.grad.flatten().tolist() for p in model.parameters()])  # type: ignore[union-attr]
    assert_on_ranks([[own[part][0], alone(2)[1]] for part in range(2)], world.run(body))


@requirement(
    "REPL-APPLY-06",
    "A replicated model with tensor-parallel layers on the other mesh dimension trains as on one device.",
    source="torch/distributed/_composable/replicate.py: device_mesh; torch/distributed/tensor/parallel/ddp.py",
)
@pytest.mark.world(2, 4)
def test_tensor_parallel(world: World) -> None:
    """Compare outputs of three steps; two layers, column-wise and row-wise, on two tensor-parallel ranks."""
    data = world.size // 2

    def body(rank: Rank) -> list[list[float]]:
        mesh = rank.mesh(data, 2, names=("data", "tensor"))
        model = layers().to(rank.device)
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        replicate(model, device_mesh=mesh["data"])
        return steps(model, [mesh["data"].get_local_rank()])

    expected = steps(layers(), list(range(data)))
    assert_on_ranks(
        [[e[2 * (r // 2) : 2 * (r // 2) + 2] for e in expected] for r in range(world.size)], world.run(body)
    )


@requirement(
    "REPL-APPLY-09",
    "A replicated model with tensor-parallel layers on the other mesh dimension gives the outputs of one device "
    "in every forward.",
    source="torch/distributed/_composable/replicate.py: device_mesh; torch/distributed/tensor/parallel/ddp.py",
)
@requirement(
    "REPL-APPLY-12",
    "Repeated backwards of a replicated model with tensor-parallel layers do not fail.",
    source="torch/distributed/_composable/replicate.py: device_mesh; torch/distributed/tensor/parallel/ddp.py",
)
@pytest.mark.world(2, 4)
def test_tensor_parallel_outputs(world: World) -> None:
    """Run three forwards and backwards; two layers, column-wise and row-wise, on two tensor-parallel ranks."""

    def body(rank: Rank) -> list[list[float]]:
        mesh = rank.mesh(rank.size // 2, 2, names=("data", "tensor"))
        model = layers().to(rank.device)
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        replicate(model, device_mesh=mesh["data"])
        outputs = []
        for number in range(3):
            output = model(row(rank.index // 2 + number).to(rank.device))
            output.sum().backward()
            outputs.append(output.flatten().tolist())
        return outputs

    model = layers()
    expected = [[model(row(p + n)).flatten().tolist() for n in range(3)] for p in range(2)]
    assert_on_ranks([expected[r // 2] for r in range(world.size)], world.run(body))


@requirement(
    "REPL-APPLY-09",
    "A replicated model with tensor-parallel layers on the other mesh dimension gives the outputs of one device "
    "in every forward.",
    source="torch/distributed/_composable/replicate.py: device_mesh; torch/distributed/tensor/parallel/ddp.py",
)
@pytest.mark.world(4)
def test_outputs_on_flattened(world: World) -> None:
    """The same, where the data-parallel dimension is two dimensions of the mesh that are flattened into one."""

    def body(rank: Rank) -> list[list[float]]:
        mesh = rank.mesh(2, 1, 2, names=("outer", "inner", "tensor"))
        data = flattened(mesh["outer", "inner"], "data")
        model = layers().to(rank.device)
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        replicate(model, device_mesh=data)
        outputs = []
        for number in range(3):
            output = model(row(data.get_local_rank() + number).to(rank.device))
            output.sum().backward()
            outputs.append(output.flatten().tolist())
        return outputs

    model = layers()
    expected = [[model(row(p + n)).flatten().tolist() for n in range(3)] for p in range(2)]
    assert_on_ranks([expected[r // 2] for r in range(world.size)], world.run(body))


@requirement(
    "REPL-APPLY-07",
    "A forward removes no parameter from a replicated model or from its state dict.",
    source="torch/distributed/_composable/replicate.py: device_mesh; torch/distributed/tensor/parallel/ddp.py",
)
@pytest.mark.parametrize("plan", ["divided", "whole"])
@pytest.mark.world(2)
def test_names_after_forward(world: World, plan: str) -> None:
    """Test with and without tensor-parallel layers."""

    def body(rank: Rank) -> list[list[str]]:
        mesh = rank.mesh(1, 2, names=("data", "tensor"))
        model = layers().to(rank.device)
        if plan == "divided":
            parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        replicate(model, device_mesh=mesh["data"])
        model(row(0).to(rank.device)) + 0  # which waits for the output
        return [[name for name, _ in model.named_parameters()], list(model.state_dict())]

    names = ["0.weight", "1.weight"]
    assert_on_ranks([[names, names]] * world.size, world.run(body))


def steps(model: nn.Module, parts: list[int]) -> list[list[float]]:
    """Return the outputs of three steps of SGD on the mean over parts: one part per rank, or all on a single device."""
    optimizer = torch.optim.SGD(model.double().parameters(), lr=2.0**-10)
    device = next(model.parameters()).device
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        output = torch.cat([model(row(part).double().to(device)) for part in parts])
        (output.sum() / len(parts)).backward()
        optimizer.step()
        outputs.append(output.flatten().tolist())
    return outputs


@requirement(
    "REPL-LIFE-01",
    "A replicated module and everything created for it are freed once nothing references the module.",
    source="torch/distributed/_composable/replicate.py: _ReplicateState.init, _ddp_weakref",
)
@pytest.mark.parametrize("trained", [False, True], ids=["wrapped", "trained"])
@pytest.mark.world(1, 2)
def test_lifetime(world: World, trained: bool) -> None:
    """Hold weak references to the module, a parameter, a layer, its state and, after training, its DDP."""

    def body(rank: Rank) -> list[bool]:
        model = replicate(layers().to(rank.device))
        objects = (model, model[0], next(model.parameters()), replicate.state(model))  # type: ignore[index]
        seen = [weakref.ref(x) for x in objects]
        del objects
        if trained:
            train(model, rank.index)
            seen += [weakref.ref(x) for x in gc.get_objects() if type(x) is DistributedDataParallel]
        del model
        gc.collect()
        return [found() is None for found in seen]

    for found in world.run(body):
        assert all(found)
