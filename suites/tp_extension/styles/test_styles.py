"""How parallelize_module reads a plan, and what each style does to parameters, inputs and outputs."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fixtures.placements import laid_out
from fixtures.tensors import chunk, numbers
from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.stacks.limit import runs_with

SOURCE = "torch.distributed.tensor.parallel"
STYLES: dict[str, tuple[Callable[[], nn.Module], Callable[[], ParallelStyle]]] = {
    "columns-of-linear": (lambda: nn.Linear(6, 12), ColwiseParallel),
    "columns-of-embedding": (lambda: nn.Embedding(6, 12), ColwiseParallel),
    "rows-of-linear": (lambda: nn.Linear(12, 6), RowwiseParallel),
    "rows-of-embedding": (lambda: nn.Embedding(12, 6), RowwiseParallel),
    "sequence-of-norm": (lambda: nn.LayerNorm(6), SequenceParallel),
}


class Scale(nn.Module):
    """Multiply by a weight and add a bias, each of one value per feature: exact where a norm would round."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(features))
        self.bias = nn.Parameter(numbers(features) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of ``x``."""
        return x * self.weight + self.bias


class Block(nn.Module):
    """Two layers with names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)


class Blocks(nn.Module):
    """Blocks in a list, one by itself, and a layer, beside others whose names begin with theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.layer_0, self.head = Block(), nn.Linear(6, 12)
        self.layer_01, self.head_2 = Block(), nn.Linear(6, 12)
        self.numbered = nn.ModuleDict({"1": nn.Linear(6, 12), "10": nn.Linear(6, 12)})


def whole(tensor: Any) -> torch.Tensor:
    """Return the whole of a DTensor, and any other tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placements(tensor: Any) -> tuple[Placement, ...] | None:
    """Return the placements of a DTensor, and None for any other tensor."""
    return tensor.placements if isinstance(tensor, DTensor) else None


@requirement(
    "TP-PLAN-01",
    "A parameter of a parallelized module requires a gradient exactly if it did before.",
    source=f"{SOURCE}: ColwiseParallel, RowwiseParallel, SequenceParallel",
)
@pytest.mark.parametrize("frozen", ["weight", "all"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.world(1, 2)
def test_frozen(world: World, style: str, frozen: str) -> None:
    """Freeze the weight, or all parameters, before the module is parallelized."""
    make, parallel = STYLES[style]

    def body(rank: Rank) -> dict[str, bool]:
        module = make().to(rank.device)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(frozen not in (name, "all"))
        parallelize_module(module, rank.mesh(), parallel())
        assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
        return {name: parameter.requires_grad for name, parameter in module.named_parameters()}

    required = {name: frozen not in (name, "all") for name, _ in make().named_parameters()}
    assert_on_ranks([required] * world.size, world.run(body))


PLANS = {
    "each": ["layers.*.up", "head"],
    "whole-names": ["layer_0.down", "numbered.1", "he", "numbere.10", "layer_01.u"],
    "anywhere": ["*.up"],
    "some": ["layers.[02].down", "layer_?.down"],
    "part-of-a-name": ["lay*.1.*", "he*"],
    "nothing": ["layers.7.up", "layer_?.sideways"],
    "some of nothing": ["no", "layers.7.up", "head", "layer_0.no", "layer_0.up", "layers.*.no", "layers.1.down"],
}
WARNED = ("nothing", "whole-names", "some of nothing")
"""Plans with keys that match nothing."""


@requirement(
    "TP-PLAN-02",
    "A key of a plan applies to every module whose name its patterns match, one name for each level.",
    source=f"{SOURCE}: parallelize_module: fnmatch of the names of children",
)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.world(2)
def test_patterns(world: World, plan: str) -> None:
    """Use patterns that match all, some or none of the children at a level; a key that matches none gives a warning."""

    def named(name: str) -> bool:
        parts = name.split(".")
        keys = [key.split(".") for key in PLANS[plan]]
        return any(len(k) == len(parts) and all(map(fnmatchcase, parts, k)) for k in keys)

    def body(rank: Rank) -> dict[str, bool]:
        module = Blocks().to(rank.device)
        with pytest.warns(UserWarning, match="could not be resolved") if plan in WARNED else nullcontext():
            parallelize_module(module, rank.mesh(), {key: ColwiseParallel() for key in PLANS[plan]})
        linears = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
        for linear in linears.values():
            assert placements(linear.weight) in (None, (Shard(0),))
        return {name: placements(linear.weight) is not None for name, linear in linears.items()}

    names = [name for name, module in Blocks().named_modules() if isinstance(module, nn.Linear)]
    assert_on_ranks([{name: named(name) for name in names}] * world.size, world.run(body))


class Both(Block):
    """A block that is given and returns rows."""

    def forward(self, x: Any) -> Any:
        """Return the result of both layers."""
        return self.down(self.up(x))


@requirement(
    "TP-PLAN-18",
    "Every entry of a plan is applied, the one for the module itself among them, whatever their order.",
    source=f"{SOURCE}: parallelize_module: parallelize_plan",
)
@pytest.mark.world(2)
def test_order_of_a_plan(world: World) -> None:
    """Name the module itself first, between its layers or last, at the top and below."""

    def body(rank: Rank) -> None:
        x, weights = (numbers(4, 6) % 5).to(rank.device), (numbers(4, 6) % 3).to(rank.device)
        plain = Both().to(rank.device)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(numbers(*parameter.shape) % 3)
        (plain(x) * weights).sum().backward()
        entries: dict[str, Callable[[], ParallelStyle]] = {
            "": lambda: PrepareModuleInputOutput(
                input_layouts=Shard(0),
                desired_input_layouts=Replicate(),
                use_local_input=True,
                output_layouts=Replicate(),
                desired_output_layouts=Shard(0),
            ),
            "up": ColwiseParallel,
            "down": RowwiseParallel,
        }
        rows = chunk(x, rank.size, rank.index, 0)
        for names in itertools.permutations(entries):
            for name in "", "child":
                module = Both().to(rank.device)
                module.load_state_dict(plain.state_dict())
                root: nn.Module = nn.ModuleDict({"child": module}) if name else module
                plan: dict[str, Any] = {key: entries[key]() for key in names}
                assert parallelize_module(root, rank.mesh(), {name: plan} if name else plan) is root
                up, down, output = module.up, module.down, module(rows)
                assert (placements(up.weight), placements(up.bias)) == ((Shard(0),), (Shard(0),)), names
                assert (placements(down.weight), placements(down.bias)) == ((Shard(1),), (Replicate(),)), names
                assert_same(chunk(plain(x), rank.size, rank.index, 0), output, f"output for {names}")
                (output * chunk(weights, rank.size, rank.index, 0)).sum().backward()
                for (key, found), right in zip(module.named_parameters(), plain.parameters(), strict=True):
                    assert_same(right.grad, whole(found.grad), f"gradient of {key} for {names}")

    world.run(body)


@requirement(
    "TP-PLAN-03",
    "Parallelized parameters have the data of the rank src_data_rank, or of each rank itself for None.",
    source=f"{SOURCE}: parallelize_module: src_data_rank",
)
@pytest.mark.parametrize("keys", [("style", "layer", "path", "pattern"), ("root",)], ids=["named", "root"])
@pytest.mark.parametrize("source", ["none", "default", "last"])
@pytest.mark.world(1, 2, 3)
def test_source_of_data(world: World, source: str, keys: tuple[str, ...]) -> None:
    """Ranks have different parameters; name the module by the style alone, by a name, a path, a pattern or ``""``."""

    def body(rank: Rank) -> None:
        for key in keys:
            layer = nn.Linear(6, 12, device=rank.device)
            with torch.no_grad():
                layer.weight.copy_(numbers(12, 6) + 100 * rank.index)
            parents = {"layer": nn.ModuleDict({"a": layer}), "path": nn.ModuleDict({"a": nn.ModuleDict({"b": layer})})}
            parents["pattern"] = parents["path"]
            plan: Any = {"style": ColwiseParallel(), "root": {"": ColwiseParallel()}, "layer": {"a": ColwiseParallel()}}
            plan |= {"path": {"a.b": ColwiseParallel()}, "pattern": {"*.?": ColwiseParallel()}}
            index = {"none": rank.index, "default": 0, "last": rank.size - 1}[source]
            asked = {"none": {"src_data_rank": None}, "default": {}, "last": {"src_data_rank": rank.size - 1}}[source]
            parallelize_module(parents.get(key, layer), rank.mesh(), plan[key], **asked)
            weight: Any = layer.weight
            expected = chunk((numbers(12, 6) + 100 * index).to(rank.device), rank.size, rank.index, 0)
            assert_same(expected, weight.to_local(), f"{key}, local part of the weight")

    world.run(body)


def given_to(module: nn.Module, mesh: DeviceMesh) -> DTensor:
    """Return the replicated input of one of the layers in STYLES."""
    width: Any = getattr(module, "in_features", 6)
    x = numbers(2, 4) % 5 if isinstance(module, nn.Embedding) else numbers(2, 4, width) % 7
    if isinstance(module, nn.Embedding):
        x = x.long()
    return DTensor.from_local(x.to(mesh.device_type), mesh, [Replicate()], run_check=False)


@requirement(
    "TP-PLAN-75",
    "A style object that has parallelized a module treats the module of another call as a new object would.",
    source=f"{SOURCE}: parallelize_module: parallelize_plan, device_mesh, src_data_rank",
)
@pytest.mark.world(2)
def test_style_again(world: World) -> None:
    """Every source of data comes after each, with two meshes in turn, and with the style alone or in a plan."""

    def body(rank: Rank) -> None:
        meshes = rank.mesh(2, 1, names=("both", "alone"))
        for key, (make, parallel) in STYLES.items():
            style, made = parallel(), []
            other = 0 if parallel is SequenceParallel else 100  # which takes each rank's data, as is documented
            for call, source in enumerate((None, None, 0, 0, 1, 1, None, 1, 0, None)):
                what, alone, modules = f"{key}, call {call}", call % 4 == 3, []
                mesh = meshes["alone" if alone else "both"]
                options: Any = {} if source == 0 else {"src_data_rank": source and source * (not alone)}
                for applied in style, parallel():
                    module = make().to(rank.device)
                    with torch.no_grad():
                        for parameter in module.parameters():
                            parameter.copy_(numbers(*parameter.shape) % 11 + other * rank.index)
                    plan: Any = applied if call % 3 else {"layer": applied}
                    parallelize_module(module if call % 3 else nn.ModuleDict({"layer": module}), mesh, plan, **options)
                    modules.append(module)
                of = rank.index if source is None or alone else source
                for name, own in modules[0].named_parameters():
                    fresh: Any = modules[1].get_parameter(name)
                    assert isinstance(own, DTensor), what
                    assert (own.placements, own.device_mesh) == (fresh.placements, mesh), f"{what}: {name}"
                    right = (numbers(*own.shape) % 11 + other * of).to(rank.device)
                    assert_same(laid_out(right, mesh, own.placements), own.to_local().detach(), f"{what}: {name}")
                with torch.no_grad():
                    outputs = [whole(module(given_to(module, mesh))) for module in modules]
                assert_same(outputs[1], outputs[0], f"{what}: output")
                made.append((modules[0], mesh, outputs[1]))
            for call, (module, mesh, output) in enumerate(made):
                with torch.no_grad():
                    assert_same(output, whole(module(given_to(module, mesh))), f"{key}, call {call}: output after all")
        rows: Any = {"input_layouts": (Shard(0), None), "desired_input_layouts": (Replicate(), None)}
        back: Any = {"output_layouts": (Replicate(), None), "desired_output_layouts": (Shard(0), None)}
        prepare = PrepareModuleInputOutput(**rows, **back, use_local_input=True)
        told = [(name, parallelize_module(Told(), meshes[name], prepare)) for name in ("both", "alone", "both")]
        x = numbers(4, 3).to(rank.device)
        for i in 0, 1, 2, 1, 0:
            name, module = told[i]
            part = chunk(x, meshes[name].size(), meshes[name].get_local_rank())
            assert_same(part, module(part, None)[0], f"prepared output {i}, {name}")
            assert_same(x, module.seen[0], f"prepared input {i}, {name}")

    world.run(body)


@requirement(
    "TP-PLAN-76",
    "Distributing a module that a style or distribute_module has distributed raises an error on every rank, and "
    "changes nothing.",
    source="torch.distributed.tensor.distribute_module; torch.distributed.tensor.parallel.parallelize_module",
)
@pytest.mark.world(2)
def test_twice(world: World) -> None:
    """Name the module by the same style object, a new one or a plan, or distribute it with each function or none."""

    def body(rank: Rank) -> None:
        mesh, called = rank.mesh(), []

        def partition(name: str, module: nn.Module, on: Any) -> None:
            called.append(name)

        def taken(of: Any, values: Any, on: Any) -> Any:
            called.append(values)
            return values

        functions = ({}, {"partition_fn": partition}, {"input_fn": taken}, {"output_fn": taken})
        for key, (make, parallel) in STYLES.items():
            style = parallel()
            for first in "style", "plan", "distribute_module":
                what = f"{key} after {first}"
                module = make().to(rank.device)
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.copy_(numbers(*parameter.shape) % 11)
                root = nn.ModuleDict({"layer": module})
                if first == "style":
                    parallelize_module(module, mesh, style)
                elif first == "plan":
                    parallelize_module(root, mesh, {"lay*": style})
                else:
                    distribute_module(module, mesh)
                before = dict(module.named_parameters())
                with torch.no_grad():
                    right = module(given_to(module, mesh))
                plans: list[Any] = [style, parallel(), {"layer": style}, {"*": parallel()}]
                for plan in plans:
                    with pytest.raises(RuntimeError, match="once"):
                        parallelize_module(root if isinstance(plan, dict) else module, mesh, plan)
                for options in functions:
                    with pytest.raises(RuntimeError, match="once"):
                        distribute_module(module, mesh, **options)
                after = dict(module.named_parameters())
                assert after.keys() == before.keys(), what
                assert all(after[name] is parameter for name, parameter in before.items()), what
                with torch.no_grad():
                    assert_same(whole(right), whole(module(given_to(module, mesh))), what)
            twice = nn.ModuleDict({"layer": make().to(rank.device)})
            with pytest.raises(RuntimeError, match="once"):
                parallelize_module(twice, mesh, {"layer": style, "l*": parallel()})
        assert not called

    world.run(body)


@requirement(
    "TP-PLAN-04",
    "SequenceParallel takes and returns activations that are sharded over the dimension sequence_dim.",
    source=f"{SOURCE}: SequenceParallel: sequence_dim",
)
@pytest.mark.parametrize("dim", [0, 1, -2])
@pytest.mark.world(1, 2, 3)
def test_sequence_dimension(world: World, dim: int) -> None:
    """Give a local part, or a DTensor that is sharded so, is whole or is sharded over another dimension."""

    def body(rank: Rank) -> None:
        x, weights = numbers(6, 6, 5).to(rank.device), (numbers(6, 6, 5) % 3).to(rank.device)
        at = dim % 3
        part, across = (chunk(x, rank.size, rank.index, i) for i in (at, 1 - at))
        cases: dict[str, tuple[torch.Tensor, Placement | None]] = {
            "local": (part, None),
            "sharded": (part, Shard(at)),
            "whole": (x, Replicate()),
            "otherwise": (across, Shard(1 - at)),
        }
        for given, (local, layout) in cases.items():
            plain, module = Scale(5).to(rank.device), Scale(5).to(rank.device)
            parallelize_module(module, rank.mesh(), SequenceParallel(sequence_dim=dim))
            output = module(DTensor.from_local(local, rank.mesh(), [layout], run_check=False) if layout else local)
            assert placements(output) == (Shard(at),), given
            assert_same(plain(x), whole(output), f"output, {given}")
            (plain(x) * weights).sum().backward()
            (
                output * DTensor.from_local(chunk(weights, rank.size, rank.index, at), rank.mesh(), [Shard(at)])
            ).sum().backward()
            for name, parameter in plain.named_parameters():
                assert_same(parameter.grad, whole(getattr(module, name).grad), f"gradient of {name}, {given}")

    world.run(body)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(6),
    "layer norm without bias": lambda: nn.LayerNorm(6, bias=False),
    "layer norm without parameters": lambda: nn.LayerNorm(6, elementwise_affine=False),
    "rms norm": lambda: nn.RMSNorm(6),
    "rms norm without parameters": lambda: nn.RMSNorm(6, elementwise_affine=False),
    "dropout": lambda: nn.Dropout(0.0),
}


@requirement(
    "TP-PLAN-19",
    "A norm or dropout in SequenceParallel has one device's output and gradients, those of its bias among them.",
    source=f"{SOURCE}: SequenceParallel: nn.LayerNorm, nn.Dropout, RMSNorm",
)
@pytest.mark.parametrize("local", [True, False], ids=["local", "dtensor"])
@pytest.mark.world(2, 3)
def test_norms(world: World, local: bool) -> None:
    """Use each of the layers with and without parameters; ranks divide the 6 rows."""

    def body(rank: Rank) -> None:
        x, weights = ((numbers(2, 6, 6) * k % 11).double().to(rank.device) for k in (7, 5))
        for name, make in NORMS.items():
            plain, module = make().double().to(rank.device), make().double().to(rank.device)
            with torch.no_grad():
                for parameter in (*plain.parameters(), *module.parameters()):
                    parameter.copy_(numbers(*parameter.shape))
            parallelize_module(module, rank.mesh(), SequenceParallel(use_local_output=local))
            alone, own = x.clone().requires_grad_(), chunk(x, rank.size, rank.index, 1).clone().requires_grad_()
            expected, output = plain(alone), module(own)
            assert isinstance(output, DTensor) != local, name
            (expected * weights).sum().backward()
            found = output.to_local() if isinstance(output, DTensor) else output
            (found * chunk(weights, rank.size, rank.index, 1)).sum().backward()
            assert alone.grad is not None
            close(chunk(expected, rank.size, rank.index, 1), found, name)
            close(chunk(alone.grad, rank.size, rank.index, 1), own.grad, f"gradient of the input of {name}")
            for (key, right), parameter in zip(plain.named_parameters(), module.parameters(), strict=True):
                close(right.grad, whole(parameter.grad), f"gradient of the {key} of {name}")

    def close(expected: Any, found: Any, what: str) -> None:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=what)

    world.run(body)


@requirement(
    "TP-PLAN-05",
    "A parallel embedding, by rows or columns, has one device's output and gradients in every output layout.",
    source=f"{SOURCE}: ColwiseParallel, RowwiseParallel: output_layouts, use_local_output",
)
@pytest.mark.parametrize("local", [True, False], ids=["local", "dtensor"])
@pytest.mark.parametrize("layout", [Replicate(), Shard(0), Shard(1), Shard(-1)], ids=str)
@pytest.mark.parametrize("style", [RowwiseParallel, ColwiseParallel], ids=["rows", "columns"])
@pytest.mark.world(1, 2, 3)
@pytest.mark.each_choice
def test_embedding(world: World, style: Any, layout: Placement, local: bool) -> None:
    """Look up each row once, and some twice; 3 ranks do not divide the 7 rows."""

    def body(rank: Rank) -> None:
        indices = torch.tensor([*range(7), 0, 3, 6, 6, 6], device=rank.device).reshape(6, 2)
        plain, module = nn.Embedding(7, 6, device=rank.device), nn.Embedding(7, 6, device=rank.device)
        with torch.no_grad():
            for embedding in plain, module:
                embedding.weight.copy_(numbers(7, 6))
        parallelize_module(
            module, rank.mesh(), style(input_layouts=Replicate(), output_layouts=layout, use_local_output=local)
        )
        expected, output = plain(indices), module(indices)
        assert isinstance(output, DTensor) != local
        at = layout.dim % 3 if isinstance(layout, Shard) else None
        part = expected if at is None else chunk(expected, rank.size, rank.index, at)
        assert_same(part, output.to_local() if isinstance(output, DTensor) else output, "local output")
        weights = (numbers(6, 2, 6) % 3).to(rank.device)
        (expected * weights).sum().backward()
        mine = weights if at is None else chunk(weights, rank.size, rank.index, at)
        local_output = output.to_local() if isinstance(output, DTensor) else output
        (local_output * mine).sum().backward()
        assert_same(plain.weight.grad, whole(module.weight.grad), "gradient")

    world.run(body)


@requirement(
    "TP-PLAN-20",
    "A parallel embedding takes other tokens of the same shape in each call, whether or not a backward came between.",
    source=f"{SOURCE}: ColwiseParallel, RowwiseParallel",
)
@pytest.mark.world(2, 3)
def test_other_tokens(world: World) -> None:
    """Use two embeddings of as many rows in turns, with and without gradients; backwards come at once or at the end."""

    def body(rank: Rank) -> None:
        for style, dim, local in itertools.product((RowwiseParallel, ColwiseParallel), (None, 0, -1), (True, False)):
            late = local == (dim == 0)
            what = f"{style.__name__}, {dim=}, {local=}, {late=}"
            layout = Replicate() if dim is None else Shard(dim)
            widths = (6, 6 if local else 4)
            plains, modules = ([nn.Embedding(7, width, device=rank.device) for width in widths] for _ in range(2))
            for i, embedding in enumerate((*plains, *modules)):
                with torch.no_grad():
                    embedding.weight.copy_(numbers(*embedding.weight.shape) + i % 2)
            for module in modules:
                options: Any = {"input_layouts": Replicate(), "output_layouts": layout, "use_local_output": local}
                parallelize_module(module, rank.mesh(), style(**options))
            losses: list[torch.Tensor] = []
            for call in range(6):
                tokens = (torch.arange(6, device=rank.device) * 3 + call).remainder(7).reshape(6, 1)
                found = []
                for embedding in plains[call // 2 % 2], modules[call // 2 % 2]:
                    with torch.no_grad() if call == 2 else nullcontext():
                        found.append(embedding(tokens))
                expected, output = found[0], found[1].to_local() if isinstance(found[1], DTensor) else found[1]
                mine = expected if dim is None else chunk(expected, rank.size, rank.index, dim % 3)
                assert_same(mine.detach(), output.detach() + 0, f"{what}: call {call}")
                if call != 2:
                    losses += [expected.sum() * (call + 1), output.sum() * (call + 1)]
                if losses and not late:
                    torch.stack(losses).sum().backward()
                    losses = []
            if losses:
                torch.stack(losses).sum().backward()
            for plain, module in zip(plains, modules, strict=True):
                assert_same(plain.weight.grad, whole(module.weight.grad), f"{what}: gradient")

    world.run(body)


@requirement(
    "TP-PLAN-256",
    "A column-wise layer may be followed by a row-wise one whatever the number of features between them.",
    source=f"{SOURCE}: ColwiseParallel, RowwiseParallel; pytorch/pytorch#150336",
)
@pytest.mark.parametrize("features", ["even", "uneven-dtensor", "uneven-local"])
@pytest.mark.world(2)
def test_features_between(world: World, features: str) -> None:
    """Let two ranks divide 4 or 6 features, or not 5, which the layers hand over as a DTensor or as local tensors."""

    def body(rank: Rank) -> None:
        for count in (4, 6) if features == "even" else (5,):
            plain = nn.Sequential(nn.Linear(4, count), nn.Linear(count, 4)).to(rank.device)
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.copy_(numbers(*parameter.shape) % 3)
            module, given = copy.deepcopy(plain), (numbers(2, 4) % 5).to(rank.device)
            first = ColwiseParallel(use_local_output=features != "uneven-dtensor")
            parallelize_module(module, rank.mesh(), {"0": first, "1": RowwiseParallel()})
            assert_same(plain(given).detach(), module(given).detach() + 0, f"{count} features")

    world.run(body)


LOSSES = {"sum of squares": lambda x: (x * x.detach()).sum(), "sum": lambda x: x.sum()}
"""Losses by which the gradient of an output is contiguous or not."""


@requirement(
    "TP-PLAN-7606",
    "The output of a parallel layer may be sharded by positions, whatever their number.",
    source=f"{SOURCE}: ColwiseParallel, RowwiseParallel: output_layouts",
)
@pytest.mark.parametrize("positions", [4, 3, 1])
@pytest.mark.parametrize("style", [RowwiseParallel, ColwiseParallel], ids=["rows", "columns"])
@pytest.mark.world(2)
def test_positions_of_output(world: World, style: Any, positions: int) -> None:
    """Compare the outputs and the gradients of a linear layer with those of one device."""

    def body(rank: Rank) -> None:
        plain = nn.Linear(4, 6).to(rank.device)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.copy_(numbers(*parameter.shape) % 3)
        module, given = copy.deepcopy(plain), (numbers(2, positions, 4) % 5).to(rank.device)
        parallelize_module(module, rank.mesh(), style(input_layouts=Replicate(), output_layouts=Shard(1)))
        for what, loss in LOSSES.items():
            if runs_with("<2.12") and (style, positions, what) == (RowwiseParallel, 3, "sum"):
                continue  # which is refused there, as that of columns is
            expected, output = plain(given), module(given)
            assert_same(chunk(expected, rank.size, rank.index, 1).detach(), output.detach() + 0, "output")
            loss(expected).backward()
            loss(output).backward()
            for (name, one), other in zip(plain.named_parameters(), module.parameters(), strict=True):
                assert_same(one.grad, other.grad.full_tensor(), f"gradient of {name} from the {what}")

    world.run(body)


WITHOUT_GRADIENTS = {"grad": nullcontext, "no-grad": torch.no_grad, "inference": torch.inference_mode}


@requirement(
    "TP-PLAN-06",
    "The local output of a parallel layer is complete when it is read, with gradients or without.",
    source=f"{SOURCE}: ColwiseParallel, RowwiseParallel, PrepareModuleOutput: use_local_output",
)
@pytest.mark.parametrize("mode", WITHOUT_GRADIENTS)
@pytest.mark.parametrize("style", ["rows", "columns", "output"])
@pytest.mark.world(2)
def test_complete(world: World, style: str, mode: str) -> None:
    """The output is large, a rank is late, and the output is read as memory."""
    size = 1 << 20

    def body(rank: Rank) -> None:
        mesh = rank.mesh()
        module = nn.Linear(2, 2, bias=False, device=rank.device)
        nn.init.ones_(module.weight)
        if style == "rows":
            parallelize_module(module, mesh, RowwiseParallel())
            x, expected = torch.ones(size, 1, device=rank.device), 2.0
        elif style == "columns":
            parallelize_module(module, mesh, ColwiseParallel(output_layouts=Replicate()))
            x, expected = torch.ones(size, 2, device=rank.device), 2.0
        else:
            wanted = PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate())
            parallelize_module(module, mesh, wanted)
            x, expected = torch.ones(size // 2, 2, device=rank.device), 2.0
        with WITHOUT_GRADIENTS[mode]():
            for _ in range(2):
                time.sleep(0.05 * rank.index)
                output = module(x)
                assert not isinstance(output, DTensor)
                assert output.shape == (size, 2)
                assert torch.equal(output.detach().clone(), torch.full((size, 2), expected, device=rank.device))

    world.run(body)


class Told(nn.Module):
    """Remember what it is given, and return it."""

    seen: tuple[Any, ...]

    def forward(self, x: Any, y: Any, *, scale: Any = None) -> tuple[Any, Any]:
        """Return both inputs."""
        self.seen = x, y, scale
        return x, y


@requirement(
    "TP-PLAN-07",
    "Prepared inputs reach a module, and prepared outputs leave it, in the desired layouts.",
    source=f"{SOURCE}: PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput",
)
@requirement(
    "TP-PLAN-10",
    "Inputs or outputs for which a style has no layout are passed on unchanged.",
    source=f"{SOURCE}: PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput",
)
@pytest.mark.parametrize("side", ["input", "keyword", "output", "both"])
@pytest.mark.world(1, 2, 3)
def test_prepared(world: World, side: str) -> None:
    """One of two is sharded over rows; the other has no layout. Ask for local tensors or DTensors in two layouts.

    Layouts of keywords alone may be given to the style of both sides, too.
    """

    def prepared(rank: Rank, desired: Placement, local: bool, named: str) -> None:
        x = numbers(6, 6).to(rank.device)
        part, other = chunk(x, rank.size, rank.index, 0), numbers(2).to(rank.device)
        inputs: Any = {"input_layouts": (Shard(0), None), "desired_input_layouts": (desired, None)}
        outputs: Any = {"output_layouts": (Shard(0), None), "desired_output_layouts": (desired, None)}
        keyword: Any = {"input_kwarg_layouts": {"scale": Shard(0)}, "desired_input_kwarg_layouts": {"scale": desired}}
        if side == "both":  # what the module gets is what it returns
            outputs = {"output_layouts": (desired, None), "desired_output_layouts": (Shard(0), None)}
        style = {
            "input": lambda: PrepareModuleInput(**inputs, use_local_output=local),
            "keyword": lambda: PrepareModuleInput(**keyword, use_local_output=local),
            "output": lambda: PrepareModuleOutput(**outputs, use_local_output=local),
            "both": lambda: PrepareModuleInputOutput(
                **inputs, use_local_input=local, **outputs, use_local_output=local
            ),
            "keyword of both": lambda: PrepareModuleInputOutput(
                **keyword, use_local_input=local, output_layouts=(None, None), desired_output_layouts=(None, None)
            ),
        }[named]()
        module = Told()
        parallelize_module(module, rank.mesh(), style)
        result = module(part, other, scale=part)
        wanted = x if isinstance(desired, Replicate) else chunk(x, rank.size, rank.index, 1)

        def check(value: Any, expected: torch.Tensor, layout: Placement, what: str) -> None:
            assert placements(value) == (None if local else (layout,)), what
            assert_same(expected, value.to_local() if isinstance(value, DTensor) else value, what)

        for i, at in enumerate(["input", "other", "keyword"]):
            if at == side or (at, side) == ("input", "both"):
                check(module.seen[i], wanted, desired, at)
            else:
                assert module.seen[i] is (part, other, part)[i], at
        if side == "output":
            check(result[0], wanted, desired, "output")
        elif side == "both":
            check(result[0], part, Shard(0), "output")
        assert result[1] is other

    def body(rank: Rank) -> None:
        styles = ["keyword", "keyword of both"] if side == "keyword" else [side]
        for desired, local, named in itertools.product((Replicate(), Shard(1)), (True, False), styles):
            prepared(rank, desired, local, named)

    world.run(body)


@requirement(
    "TP-PLAN-08",
    "A module that is parallelized without a mesh is on the mesh of the context.",
    source=f"{SOURCE}: parallelize_module: device_mesh",
)
@requirement(
    "TP-PLAN-11",
    "parallelize_module leaves a module without a plan as it was, with a warning.",
    source=f"{SOURCE}: parallelize_module: parallelize_plan",
)
@pytest.mark.world(2)
def test_left_out(world: World) -> None:
    """Leave out the mesh, then the plan, which gives a warning; a plan of another type is an error."""

    def body(rank: Rank) -> None:
        with rank.mesh():
            module = parallelize_module(nn.Linear(6, 12, device=rank.device), parallelize_plan=ColwiseParallel())
        weight: Any = module.weight
        assert weight.device_mesh == rank.mesh()
        assert placements(weight) == (Shard(0),)
        alone = nn.Linear(6, 12, device=rank.device)
        with pytest.warns(UserWarning, match="parallelize_plan"):
            assert parallelize_module(alone, rank.mesh()) is alone
        assert placements(alone.weight) is None
        with pytest.raises(TypeError, match="parallelize_plan"):
            parallelize_module(alone, rank.mesh(), [ColwiseParallel()])  # type: ignore[arg-type]

    world.run(body)


@requirement(
    "TP-PLAN-09",
    "In loss_parallel, the cross-entropy of logits sharded over classes has one device's loss and gradient.",
    source=f"{SOURCE}: loss_parallel",
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.world(1, 2, 3)
def test_loss(world: World, reduction: str) -> None:
    """Targets are on all ranks, and one row is ignored."""

    def body(rank: Rank) -> None:
        logits = numbers(5, 6).to(rank.device).double() / 8
        targets = torch.tensor([0, 5, 2, -100, 3], device=rank.device)
        plain = logits.clone().requires_grad_()
        expected = nn.functional.cross_entropy(plain, targets, reduction=reduction)
        expected.sum().backward()
        part = chunk(logits, rank.size, rank.index, 1).clone().requires_grad_()
        with loss_parallel():
            sharded = DTensor.from_local(part, rank.mesh(), [Shard(1)])
            loss: Any = nn.functional.cross_entropy(sharded, targets, reduction=reduction)
            loss.sum().backward()
        torch.testing.assert_close(whole(loss), expected.detach(), rtol=1e-12, atol=1e-12)
        assert plain.grad is not None
        gradient = chunk(plain.grad, rank.size, rank.index, 1)
        torch.testing.assert_close(part.grad, gradient, rtol=1e-12, atol=1e-12)

    world.run(body)
