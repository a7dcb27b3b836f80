"""Which parameters are averaged, and over which ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import layer
from harness import Rank, World, assert_on_ranks, requirement
from harness.stacks import replicate

SOURCE = "torch/distributed/_composable/replicate.py: replicate"


def backward(rank: Rank, model: nn.Module) -> dict[str, list[float]]:
    """Run one backward on the rank's own data and return the gradients by name, flattened."""
    model(torch.full((1, 2), 1.0 + rank.index, device=rank.device)).sum().backward()
    return {name: gradient.flatten().tolist() for name, gradient in replicate.gradients(model).items()}


class LayerOrNone(nn.Module):
    """A layer that a forward uses, or no parameter at all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layer()

    def forward(self, x: torch.Tensor, with_layer: bool) -> torch.Tensor:
        """Return the layer's output, or twice the input."""
        result: torch.Tensor = self.inner(x) if with_layer else x * 2
        return result


@requirement(
    "REPL-IGN-01",
    "Parameters of ignored modules, including nested ones, keep the gradients of their rank, while all others are "
    "averaged.",
    source="torch/distributed/_composable/replicate.py: replicate, ignored_modules",
)
@pytest.mark.parametrize("ignored", ["", "outer", "outer.inner", "last"])
@pytest.mark.world(2)
def test_ignored(world: World, ignored: str) -> None:
    """The layers have one class and lie side by side, one of them nested two modules deep."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outer = nn.ModuleDict({"inner": layer()})
            self.middle, self.last = layer(), layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.outer["inner"](x) + self.middle(x) + self.last(x)
            return result

    def body(rank: Rank) -> dict[str, list[float]]:
        model = Model()
        chosen = [model.get_submodule(ignored)] if ignored else None
        return backward(rank, replicate.apply(model, rank, ignored_modules=chosen))

    for rank, gradients in enumerate(world.run(body)):
        for name, gradient in gradients.items():
            own = bool(ignored) and name.startswith(ignored)
            assert gradient == [1.0 + rank if own else 1.5] * 4, name


@requirement(
    "REPL-IGN-04",
    "Ignored modules may be any iterable of modules, also an iterator, which can be read only once.",
    source="torch/distributed/_composable/replicate.py: replicate, ignored_modules: Iterable[torch.nn.Module]",
)
@pytest.mark.parametrize("given", [tuple, set, iter, dict.fromkeys], ids=["tuple", "set", "iterator", "keys"])
@pytest.mark.world(2)
def test_iterable_of_ignored(world: World, given: Callable[[list[nn.Module]], Iterable[nn.Module]]) -> None:
    """Two of three layers are ignored; two steps, since the model is only prepared in its first forward."""

    def body(rank: Rank) -> list[list[float]]:
        model = nn.Sequential(layer(), layer(), layer())
        replicate.apply(model, rank, ignored_modules=given([model[0], model[2]]))
        gradients = []
        for _ in range(2):
            model.zero_grad()
            gradients += backward(rank, model).values()
        return gradients

    averaged = [6.0] * 4
    own = [[4.0 * (1 + rank)] * 4 for rank in range(world.size)]
    assert_on_ranks([[own[rank], averaged, own[rank]] * 2 for rank in range(world.size)], world.run(body))


@requirement(
    "REPL-IGN-02",
    "A parameter that an ignored module shares with another module keeps the gradient of its rank.",
    source="torch/distributed/_composable/replicate.py: _ReplicateState.init, ignored_params",
)
@pytest.mark.parametrize("first", ["first", "ignored"])
@pytest.mark.parametrize("depth", range(4))
@pytest.mark.world(2)
def test_ignored_and_shared(world: World, depth: int, first: str) -> None:
    """A module shares a weight with an ignored one, or with one within it, and comes before or after that."""

    class Model(nn.Module):
        def __init__(self, rank: int) -> None:
            super().__init__()
            inner = layer()
            nn.init.constant_(inner.weight, 1.0 + rank)
            ignored: nn.Module = inner
            for _ in range(depth):
                ignored = nn.Sequential(ignored)
            shared = layer()
            shared.weight = inner.weight
            modules = {"first": shared, "ignored": ignored}
            for name in (first, *(modules.keys() - {first})):
                self.add_module(name, modules[name])
            self.third = layer()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([each(x) for each in self.children()]).sum(0)

    def body(rank: Rank) -> list[list[float]]:
        with rank.device:  # moving a module may create new parameters, and two for a shared one
            model: Any = Model(rank.index)
        replicate.apply(model, rank, ignored_modules=[model.ignored])
        found = [*backward(rank, model).values()]
        return [*found, model.first.weight.flatten().tolist()]

    own = [1.0 + rank for rank in range(world.size)]
    assert_on_ranks([[[2 * value] * 4, [1.5] * 4, [value] * 4] for value in own], world.run(body))


@requirement(
    "REPL-IGN-03",
    "Ignored modules keep the parameters and buffers of their rank, which no forward broadcasts.",
    source="torch/distributed/_composable/replicate.py: replicate, ignored_modules",
)
@pytest.mark.world(2)
def test_ignored_are_not_sent(world: World) -> None:
    """Two layers start with different weights and buffers on each rank; the second is ignored."""

    class Own(nn.Linear):
        level: torch.Tensor

        def __init__(self, rank: int) -> None:
            super().__init__(2, 2, bias=False)
            nn.init.constant_(self.weight, 1.0 + rank)
            self.register_buffer("level", torch.tensor(1.0 + rank))

    def body(rank: Rank) -> list[float]:
        first, second = Own(rank.index), Own(rank.index)
        model = replicate.apply(nn.Sequential(first, second), rank, ignored_modules=[second])
        for _ in range(2):
            model(torch.ones(1, 2, device=rank.device)).sum().backward()
        return [float(first.weight[0, 0]), float(second.weight[0, 0]), float(second.level)]

    assert_on_ranks([[1.0, 1.0, 1.0], [1.0, 2.0, 2.0]], world.run(body))


@requirement(
    "REPL-UNUSED-03",
    "A synchronized backward that reaches no parameter averages the gradients accumulated before.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters, no_sync",
)
@pytest.mark.parametrize("how", ["replicate", "DDP"])
@pytest.mark.world(2)
def test_no_parameter_at_last(world: World, how: str) -> None:
    """Run an unsynchronized backward, then a synchronized one of an output that only depends on the input."""

    def body(rank: Rank) -> list[list[float]]:
        module = LayerOrNone().to(rank.device)
        options = {"find_unused_parameters": True}
        model: Any = (
            replicate.apply(module, rank, **options)
            if how == "replicate"
            else DistributedDataParallel(module, **options)
        )
        x = torch.full((1, 2), 1.0 + rank.index, device=rank.device, requires_grad=True)
        gradients = []
        for _ in range(2):
            for with_layer in (True, False):
                if how == "replicate":
                    model.set_requires_gradient_sync(not with_layer)
                else:
                    model.require_backward_grad_sync = not with_layer
                model(x, with_layer).sum().backward()
            gradients.append(module.inner.weight.grad.flatten().tolist())
            model.zero_grad()
        return gradients

    assert_on_ranks([[[1.5] * 4] * 2] * 2, world.run(body))


@requirement(
    "REPL-UNUSED-01",
    "A parameter that only some ranks use has the average over all ranks on every rank.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters",
)
@requirement(
    "REPL-UNUSED-04",
    "A parameter that no rank uses has no gradient.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters",
)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.world(2, 4)
def test_used_by_some_ranks(world: World, views: bool) -> None:
    """Ranks take different branches, rotating in three steps, then all take the first; one branch is never used."""

    class Model(nn.Module):
        def __init__(self, branches: int) -> None:
            super().__init__()
            self.always = layer()
            self.branches = nn.ModuleList(layer() for _ in range(branches))
            self.never = layer()

        def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
            result: torch.Tensor = self.always(x) + self.branches[branch](x)
            return result

    size = world.size

    def taken(rank: int, step: int) -> int:
        return (rank + step) % size if step < 3 else 0

    def body(rank: Rank) -> list[dict[str, list[float]]]:
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
        model = replicate.apply(Model(rank.size), rank, **options)
        steps = []
        for step in range(4):
            x = torch.full((1, 2), 1.0 + rank.index, device=rank.device)
            model(x, taken(rank.index, step)).sum().backward()
            steps.append({n: g.flatten().tolist() for n, g in replicate.gradients(model).items()})
            model.zero_grad()
        return steps

    for steps in world.run(body):
        for step, gradients in enumerate(steps):
            sums = {"always.weight": sum(1.0 + r for r in range(world.size))}
            for r in range(world.size):
                branch = f"branches.{taken(r, step)}.weight"
                sums[branch] = sums.get(branch, 0.0) + 1.0 + r
            assert gradients == {name: [value / world.size] * 4 for name, value in sums.items()}


@requirement(
    "REPL-UNUSED-01",
    "A parameter that only some ranks use has the average over all ranks on every rank.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters",
)
@pytest.mark.world(2)
def test_left_out_by_one_rank(world: World) -> None:
    """One rank uses every parameter while the other leaves out one, in turn, or none, in six steps."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(layer() for _ in range(3))

        def forward(self, x: torch.Tensor, out: int | None) -> torch.Tensor:
            return torch.stack([each(x) for i, each in enumerate(self.layers) if i != out]).sum(0)

    def body(rank: Rank) -> None:
        for views in (False, True):
            model = replicate.apply(Model(), rank, find_unused_parameters=True, gradient_as_bucket_view=views)
            for step in range(6):
                by, out = step % 2, (step // 2) if step != 3 else None
                x = torch.full((1, 2), 1.0 + rank.index, device=rank.device)
                model(x, out if rank.index == by else None).sum().backward()
                found = [g.flatten().tolist() for g in replicate.gradients(model).values()]
                right = [1.5 if i != out else (2.0 - by) / 2 for i in range(3)]
                assert found == [[value] * 4 for value in right], (views, step)
                model.zero_grad()

    world.run(body)


@requirement(
    "REPL-UNUSED-01",
    "A parameter that only some ranks use has the average over all ranks on every rank.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters",
)
@pytest.mark.parametrize("idle", ["no rank", "one rank"])
@pytest.mark.world(2)
def test_no_parameter_on_one_rank(world: World, idle: str) -> None:
    """The backward of rank 1 comes to the only layer, or to no parameter at all; rank 0 always uses the layer."""

    uses = idle == "no rank"

    def body(rank: Rank) -> list[float] | None:
        group = dist.new_group(timeout=timedelta(seconds=20))
        module = LayerOrNone().to(rank.device)
        model = DistributedDataParallel(module, process_group=group, find_unused_parameters=True)
        x = torch.full((1, 2), 2.0 + 2.0 * rank.index, device=rank.device, requires_grad=True)
        model(x, rank.index == 0 or uses).sum().backward()
        gradient: torch.Tensor | None = module.inner.weight.grad
        if gradient is not None:
            return gradient.flatten().tolist()
        model(x, True).sum().backward()  # so that the other rank need not wait
        return None

    assert_on_ranks([[3.0 if uses else 1.0] * 4] * 2, world.run(body))


@requirement(
    "REPL-UNUSED-02",
    "Gradients accumulated without synchronization are averaged even for parameters that the synchronized micro-"
    "batch does not use.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters, no_sync; pytorch/pytorch#69031",
)
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
@pytest.mark.world(2, 3)
def test_unused_at_last(world: World, views: bool) -> None:
    """Run one branch without synchronization and another with it, the same or others on each rank, in three steps."""

    class Model(nn.Module):
        def __init__(self, branches: int) -> None:
            super().__init__()
            self.branches = nn.ModuleList(layer() for _ in range(branches))

        def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
            result: torch.Tensor = self.branches[branch](x)
            return result

    size = world.size
    each: list[tuple[int, list[list[int]]]] = [
        (2, [[0, 1]] * size),
        (2 * size + 1, [[r, size + r] for r in range(size)]),
    ]

    def body(rank: Rank) -> None:
        for branches, taken in each:
            options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
            model: Any = replicate.apply(Model(branches), rank, **options)
            x = torch.full((1, 2), rank.size * (1.0 + rank.index), device=rank.device)
            for step in range(3):
                for number, branch in enumerate(taken[rank.index]):
                    model.set_requires_gradient_sync(number == 1)
                    model(x, branch).sum().backward()
                sums = [sum(r + 1.0 for r in range(size) if i in taken[r]) for i in range(branches)]
                right = [[total] * 4 if total else None for total in sums]
                found = [b.weight.grad for b in model.branches]
                assert [None if g is None else g.flatten().tolist() for g in found] == right, (branches, step)
                model.zero_grad()

    world.run(body)


@requirement(
    "REPL-GROUP-01",
    "Gradients are averaged over the given group or mesh dimension only.",
    source="torch.nn.parallel.DistributedDataParallel: process_group, device_mesh",
)
@pytest.mark.parametrize("given", ["group", "first dimension", "second dimension"])
@pytest.mark.world(4)
def test_groups(world: World, given: str) -> None:
    """Pairs of ranks form two groups or either dimension of a mesh; parameters come from the pair's first rank."""
    pairs = [[0, 2], [1, 3]] if given == "first dimension" else [[0, 1], [2, 3]]

    def body(rank: Rank) -> tuple[list[float], dict[str, list[float]]]:
        if given == "group":
            groups = [rank.subgroup(pair) for pair in pairs]
            options = {"process_group": next(group for group in groups if group is not None)}
        else:
            mesh = rank.mesh(2, 2, names=("first", "second"))
            options = {"device_mesh": mesh[given.split()[0]]}
        model = layer()
        nn.init.constant_(model.weight, 1.0 + rank.index)
        averaged = backward(rank, replicate.apply(model, rank, **options))
        if given == "group":
            dist.destroy_process_group(options["process_group"])
        return model.weight.flatten().tolist(), averaged

    for rank, (weights, gradients) in enumerate(world.run(body)):
        pair = next(pair for pair in pairs if rank in pair)
        assert weights == [1.0 + pair[0]] * 4
        assert gradients == {"weight": [1.0 + sum(pair) / 2] * 4}


class Heads(nn.Module):
    """A layer whose output several heads take; the loss need not use all of them."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.trunk, self.heads, self.container = layer(), nn.ModuleList(layer() for _ in range(3)), container

    def forward(self, x: torch.Tensor) -> Any:
        x = self.trunk(x)
        outputs = [head(x) for head in self.heads]
        if self.container == "dict":
            return {str(i): output for i, output in enumerate(outputs)}
        return tuple(outputs)


@requirement(
    "REPL-UNUSED-05",
    "With find_unused_parameters, the loss may leave out outputs, whose parameters have an average over ranks or none.",
    source="torch.nn.parallel.DistributedDataParallel: find_unused_parameters; pytorch/pytorch#43259",
)
@pytest.mark.parametrize("container", ["tuple", "dict"])
@pytest.mark.parametrize("how", ["replicate", "DDP"])
@pytest.mark.world(2)
def test_outputs_left_out(world: World, how: str, container: str) -> None:
    """The loss has one head, another on each rank, several or all; in the last of three rounds gradients add up."""
    used: list[tuple[set[int], set[int]]] = [({0}, {0}), ({0}, {1}), ({0, 1}, {2}), ({2}, {2}), ({0, 1, 2}, {0})]
    every: list[dict[str, Any]] = [{}, {"bucket_cap_mb": 1e-5}, {"gradient_as_bucket_view": True}]

    def body(rank: Rank) -> None:
        for options in every:
            module = Heads(container).to(rank.device)
            options = {"find_unused_parameters": True, **options}
            model: Any = (
                replicate.apply(module, rank, **options)
                if how == "replicate"
                else DistributedDataParallel(module, **options)
            )
            totals = [0.0] * 4  # of the heads and the trunk
            for number, heads in enumerate(used * 3):
                outputs: Any = model(torch.full((1, 2), 1.0 + rank.index, device=rank.device))
                outputs = list(outputs.values() if container == "dict" else outputs)
                loss: Any = sum(outputs[i].sum() for i in heads[rank.index])
                loss.backward()
                uses = [sum(r + 1.0 for r in range(2) if i in heads[r]) for i in range(3)]
                for i, use in enumerate((*uses, sum(uses))):
                    totals[i] += 2 * use / 2  # the input of a head is twice that of the trunk
                for i, part in enumerate((*module.heads, module.trunk)):
                    gradient = part.weight.grad
                    assert (gradient is None) == (not totals[i]), f"{options}, step {number}, head {i}"
                    right = [totals[i]] * 4
                    assert gradient is None or gradient.flatten().tolist() == right, f"{options}, {number}, {i}"
                if number < 2 * len(used):
                    module.zero_grad()
                    totals = [0.0] * 4

    world.run(body)


@requirement(
    "REPL-GROUP-02",
    "Only the ranks of the group decide whether a parameter is used.",
    source="torch.nn.parallel.DistributedDataParallel: process_group, find_unused_parameters",
)
@pytest.mark.world(4)
def test_used_by_another_group(world: World) -> None:
    """Each of two pairs of ranks uses its own branch; the other branch has no gradient."""

    def body(rank: Rank) -> dict[str, list[float]]:
        groups = [rank.subgroup([0, 1]), rank.subgroup([2, 3])]
        mine = next(group for group in groups if group is not None)

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.branches = nn.ModuleDict({"0": layer(), "1": layer()})

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = self.branches[str(rank.index // 2)](x)
                return result

        gradients = backward(rank, replicate.apply(Model(), rank, process_group=mine, find_unused_parameters=True))
        dist.destroy_process_group(mine)
        return gradients

    assert_on_ranks(
        [{f"branches.{rank // 2}.weight": [1.5 if rank < 2 else 3.5] * 4} for rank in range(world.size)],
        world.run(body),
    )


@requirement(
    "REPL-CONTRACT-01",
    "replicate() raises an error for a module that is already replicated or sharded.",
    source=SOURCE,
)
@pytest.mark.parametrize("before", ["replicated", "sharded"])
@pytest.mark.world(1)
def test_refused(world: World, before: str) -> None:
    """Call replicate() after replicate() or after fully_shard()."""

    def body(rank: Rank) -> str:
        model = layer(rank.device)
        if before == "sharded":
            fully_shard(model, mesh=rank.mesh())
        else:
            replicate.apply(model, rank)
        try:
            replicate.apply(model, rank)
        except (AssertionError, RuntimeError) as e:
            return "refused" if "applied" in str(e) or "managed" in str(e) else str(e)
        return "taken"

    assert_on_ranks(["refused"], world.run(body))


@requirement(
    "REPL-NAMES-01",
    "The state of a replicated module lists the names of the averaged parameters as the module has them.",
    source="torch/distributed/_composable/replicate.py: _ReplicateState._collect_params",
)
@pytest.mark.world(1)
def test_names(world: World) -> None:
    """The names are of the module itself, a layer and nested containers, but not of an ignored module."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(2))
            self.first, self.ignored = layer(), layer()
            self.inner = nn.ModuleDict({"list": nn.ModuleList([layer()])})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.first(x * self.own) + self.inner["list"][0](x)  # type: ignore[index]
            return result

    def body(rank: Rank) -> list[str]:
        module = Model()
        model = replicate.apply(module, rank, ignored_modules=[module.ignored])
        model(torch.ones(1, 2, device=rank.device)).sum().backward()
        return replicate.names(model)

    assert_on_ranks([["own", "first.weight", "inner.list.0.weight"]], world.run(body))
