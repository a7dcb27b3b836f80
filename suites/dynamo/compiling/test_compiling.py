"""When code is compiled again, and into how many graphs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fixtures.layers import WIDE
from harness import Rank, World, assert_on_ranks, assert_same, dyadic, requirement
from harness.stacks import dynamo
from harness.stacks.collectives import functional


class Layers(nn.Module):
    """Linear layers without biases. Training mode adds one to their output, which a number then scales."""

    def __init__(self, count: int = 2, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))
        for i, layer in enumerate(self.layers):
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
            with torch.no_grad():
                layer.weight.diagonal().copy_(dyadic(width, key=i, dtype=torch.float32, span=2, denominator=1))  # type: ignore[operator, union-attr]

    def forward(self, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x + 1 if self.training else x) * factor


@requirement(
    "DYN-GUARD-01",
    "Code compiled in one mode is not used in another: gradients on or off, training or evaluation, another "
    "number, frozen or thawed parameters.",
    source="torch.compile: guards",
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "replicated"])
@pytest.mark.world(2)
def test_modes(world: World, wrapped: bool) -> None:
    """Run each mode twice, in turn, with different data on each rank."""

    def body(rank: Rank) -> None:
        alone, plain = Layers(), Layers().to(rank.device)
        model = DistributedDataParallel(plain) if wrapped else plain
        function, counter = dynamo.compiled(model, fullgraph=False)
        everyone = [dyadic(3, 4, key=("input", i), dtype=torch.float32) for i in range(rank.size)]
        for number, (training, grad, frozen, factor) in enumerate(
            2
            * [
                (True, True, False, 1),
                (False, True, False, 1),
                (False, False, False, 1),
                (True, True, True, 1),
                (True, True, False, 4),
            ]
        ):
            factor += number // 5
            model.train(training)
            alone.train(training)
            for layers in (alone, plain):
                layers.layers[0].weight.requires_grad_(not (frozen and not wrapped))  # type: ignore[union-attr]
            with torch.set_grad_enabled(grad):
                output = function(everyone[rank.index].to(rank.device), factor)
                right = alone(everyone[rank.index], factor)
                assert_same(right, output, f"output {number}")
                assert output.requires_grad == grad
            if not grad:
                continue
            output.sum().backward()
            for x in everyone if wrapped else [everyone[rank.index]]:
                (alone(x, factor).sum() / (rank.size if wrapped else 1)).backward()
            for one, other in zip(alone.parameters(), plain.parameters(), strict=True):
                assert (one.grad is None) == (other.grad is None)
                if one.grad is not None and other.grad is not None:
                    assert_same(one.grad, other.grad, f"gradient {number}")
                one.grad = other.grad = None
        assert counter.graphs > 0

    world.run(body)


@requirement(
    "DYN-COUNT-01",
    "A model is compiled at its first step, and again only for inputs of another kind.",
    source="torch.compile: guards",
)
@requirement(
    "DYN-COUNT-02",
    "Every rank compiles a model into the same number of graphs.",
    source="torch.compile: guards",
)
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "replicated"])
@pytest.mark.world(1, 3)
@pytest.mark.each_choice
def test_compiled_once(world: World, wrapped: bool) -> None:
    """Run three steps, three with another number of rows, and one with a third number, which is dynamic."""

    def body(rank: Rank) -> list[int]:
        plain = Layers().to(rank.device)
        model = DistributedDataParallel(plain) if wrapped else plain
        function, counter = dynamo.compiled(model, fullgraph=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        counts = []
        for rows in (4, 4, 4, 3, 3, 3, 5):
            function(torch.full((rows, 4), 1.0 + rank.index, device=rank.device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(counter.graphs)
        return counts

    assert_on_ranks([[1, 1, 1, 2, 2, 2, 2]] * world.size, world.run(body))


@requirement(
    "DYN-DDP-03",
    "A model under DDP is compiled into one graph for each of its buckets.",
    source="torch/_dynamo/backends/distributed.py: DDPOptimizer",
)
@requirement(
    "DYN-DDP-06",
    "A compiled model under DDP has the gradients of one device for every batch size.",
    source="torch/_dynamo/backends/distributed.py: DDPOptimizer",
)
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("layers", "width", "graphs"), [(4, WIDE, 4), (4, 8, 1)], ids=["four-buckets", "one-bucket"])
@pytest.mark.world(2)
def test_buckets(world: World, layers: int, width: int, graphs: int, dynamic: bool | None) -> None:
    """Buckets have 1 MiB, and layers that size or less; run steps of two, three and two rows."""

    def body(rank: Rank) -> None:
        alone = Layers(layers, width)
        model = DistributedDataParallel(Layers(layers, width).to(rank.device), bucket_cap_mb=1)
        function, counter = dynamo.compiled(model, dynamic=dynamic, fullgraph=False)
        for step, rows in enumerate((2, 3, 2)):
            everyone = [dyadic(rows, width, key=(step, i), dtype=torch.float32, span=2) for i in range(rank.size)]
            function(everyone[rank.index].to(rank.device)).sum().backward()
            for x in everyone:
                (alone(x).sum() / rank.size).backward()
            for one, other in zip(alone.parameters(), model.parameters(), strict=True):
                assert one.grad is not None
                assert other.grad is not None
                assert_same(one.grad, other.grad, f"gradient of step {step}")
                one.grad = other.grad = None
            if step == 0 and not dynamic:
                assert counter.graphs == graphs

    world.run(body)


@requirement(
    "DYN-HOOK-02",
    "Under compiled autograd, backward hooks of modules are called as often and with the same arguments as "
    "without compiling.",
    source="torch/_dynamo/variables/distributed.py: BackwardHookVariable",
)
@pytest.mark.parametrize("kind", ["hook", "pre-hook", "both"])
@pytest.mark.world(1, 2)
@pytest.mark.each_choice
def test_backward_hooks(world: World, kind: str) -> None:
    """Hooks on a middle layer change the gradients, each differently, in two steps."""

    def body(rank: Rank) -> None:
        def train(compile: bool) -> list[torch.Tensor]:
            model = Layers(3).to(rank.device)
            if kind != "pre-hook":
                model.layers[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
            if kind != "hook":
                model.layers[1].register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 8,))
            found = []
            for step in range(2):
                x = dyadic(2, 4, key=(rank.index, step), dtype=torch.float32).to(rank.device).requires_grad_()
                if compile:
                    function, counter = dynamo.compiled(model)
                    with dynamo.compiled_backward("aot_eager"):
                        function(x).sum().backward()
                    assert counter.graphs == 1
                else:
                    model(x).sum().backward()
                assert x.grad is not None
                found += [x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            return found

        for number, (right, found) in enumerate(zip(train(False), train(True), strict=True)):
            assert_same(right, found, f"gradient {number}")

    world.run(body)


@requirement(
    "DYN-HOOK-04",
    "Forward pre-hooks and forward hooks of a module are captured in its graph, including their collectives.",
    source="torch.nn.Module: register_forward_pre_hook, register_forward_hook; torch.compile",
)
@requirement(
    "DYN-HOOK-05",
    "Captured forward hooks change the same values as without compiling.",
    source="torch.nn.Module: register_forward_pre_hook, register_forward_hook; torch.compile",
)
@pytest.mark.world(2)
def test_forward_hooks(world: World) -> None:
    """On the middle layer, one hook halves the input and one sums the output over ranks; run two steps."""

    def body(rank: Rank) -> None:
        model = Layers(3).to(rank.device)

        def before(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return inputs[0] / 2

        def after(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(output, "sum", dist.group.WORLD) + 1

        model.layers[1].register_forward_pre_hook(before)
        model.layers[1].register_forward_hook(after)
        compiled, counter = dynamo.compiled(model)
        for step in range(2):
            results = []
            for function in (model, compiled):
                x = dyadic(2, 4, key=(rank.index, step), dtype=torch.float32).to(rank.device).requires_grad_()
                output = function(x)
                output.sum().backward()
                assert x.grad is not None
                results.append((output.detach() + 0, x.grad + 0))
            for right, other in zip(*results, strict=True):
                assert_same(right, other, f"step {step}")
        assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-P2P-01",
    "Compiled messages reach the ranks they are addressed to, in any group, by global rank or by group rank.",
    source="torch/_dynamo/variables/functions.py: isend, irecv, batch_isend_irecv",
)
@pytest.mark.needs(torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.parametrize("named", ["global", "group"])
@pytest.mark.parametrize("members", [(0, 1), (1, 2), (0, 2)], ids=["first-two", "last-two", "ends"])
@pytest.mark.world(3, timeout=15)
@pytest.mark.each_choice
def test_messages(world: World, members: tuple[int, int], named: str) -> None:
    """Two ranks send each other their tensors, twice."""

    def body(rank: Rank) -> None:
        group = dist.new_group(list(members))
        if rank.index not in members:
            return
        member = members.index(rank.index)
        peer = members[1 - member]

        def exchange(mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            if named == "global":
                sent, received = dist.isend(mine, peer, group), dist.irecv(other, peer, group)
            else:
                sent = dist.isend(mine, group=group, group_dst=1 - member)
                received = dist.irecv(other, group=group, group_src=1 - member)
            sent.wait()  # type: ignore[union-attr]
            received.wait()  # type: ignore[union-attr]
            return other * 2

        with dynamo.compiled_messages():
            torch.compiler.reset()
            counter = dynamo.GraphCounter("aot_eager")
            function = torch.compile(exchange, backend=counter, fullgraph=True)
            for call in range(2):
                mine = torch.arange(4.0, device=rank.device) + 10 * rank.index + call
                result = function(mine, torch.zeros_like(mine))
                assert_same(2 * (torch.arange(4.0) + 10 * peer + call), result + 0, f"message {call}")
            assert counter.graphs == 1

    world.run(body)


@requirement(
    "DYN-P2P-02",
    "A compiled batch of messages gives each tensor what its peer sent.",
    source="torch/_dynamo/variables/functions.py: batch_isend_irecv",
)
@pytest.mark.needs(torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.world(2, 3)
def test_batches(world: World) -> None:
    """Send around a ring in both directions."""

    def body(rank: Rank) -> None:
        following, before = (rank.index + 1) % rank.size, (rank.index - 1) % rank.size

        def exchange(mine: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            work = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, mine, following, tag=1),
                    dist.P2POp(dist.isend, mine * 2, before, tag=2),
                    dist.P2POp(dist.irecv, one, before, tag=1),
                    dist.P2POp(dist.irecv, other, following, tag=2),
                ]
            )
            for each in work:
                each.wait()
            return torch.cat([one, other])

        with dynamo.compiled_messages():
            torch.compiler.reset()
            function = torch.compile(exchange, backend="aot_eager", fullgraph=True)
            for call in range(2):
                mine = torch.arange(4.0, device=rank.device) + 10 * rank.index + call
                result = function(mine, torch.zeros_like(mine), torch.zeros_like(mine))
                expected = [torch.arange(4.0) + 10 * before + call, 2 * (torch.arange(4.0) + 10 * following + call)]
                assert_same(torch.cat(expected), result + 0, f"messages {call}")

    world.run(body)


@requirement(
    "DYN-P2P-02",
    "A compiled batch of messages gives each tensor what its peer sent.",
    source="torch/_dynamo/variables/functions.py: batch_isend_irecv",
)
@pytest.mark.needs(torch=dynamo.COMPILES_MESSAGES)
@pytest.mark.world(2, timeout=30)
def test_batches_in_a_row(world: World) -> None:
    """Send twice what came; in the second batch, the tensor or the tag of each P2POp is set after it is made."""

    def body(rank: Rank) -> None:
        peer = 1 - rank.index

        def exchange(mine: torch.Tensor, one: torch.Tensor, other: torch.Tensor, change: str) -> torch.Tensor:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, one, peer)]):
                work.wait()
            twice = one * 2
            tag = 5 if change == "tag" else 3
            send = dist.P2POp(dist.isend, mine if change == "tensor" else twice, peer, tag=tag)
            receive = dist.P2POp(dist.irecv, one if change == "tensor" else other, peer, tag=tag)
            if change == "tensor":
                send.tensor, receive.tensor = twice, other
            elif change == "tag":
                send.tag = receive.tag = 3
            for work in dist.batch_isend_irecv([send, receive]):
                work.wait()
            return torch.cat([one, other])

        with dynamo.compiled_messages():
            for change in ("nothing", "tensor", "tag"):
                function, _ = dynamo.compiled(exchange, fullgraph=change == "nothing")
                for call in range(2):
                    mine = torch.arange(4.0, device=rank.device) + 10 * rank.index + call
                    result = function(mine, torch.zeros_like(mine), torch.zeros_like(mine), change)
                    came = torch.arange(4.0) + 10 * peer + call
                    right = torch.arange(4.0) + 10 * rank.index + call
                    assert_same(torch.cat([came, 2 * right]), result + 0, f"change of {change}, call {call}")

    world.run(body)
