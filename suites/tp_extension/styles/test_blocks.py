"""Blocks of DTensor's contexts within those of other kinds, left by errors, entered again, and in several threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel, implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

from fixtures.operators import floats
from harness import Rank, World, requirement
from harness.stacks.limit import runs_with
from harness.stacks.tp_extension import ExplicitRedistributionContext


def works(call: Callable[[], Any]) -> bool:
    """Say whether a call raises no RuntimeError."""
    try:
        call()
    except RuntimeError:
        return False
    return True


class Blocks:
    """Contexts of each kind, and what shows whether a block of one is in effect."""

    def __init__(self, rank: Rank) -> None:
        self.mesh, self.plain = rank.mesh(), floats(4, 4).to(rank.device)
        self.rows = distribute_tensor(self.plain, self.mesh, [Shard(0)])
        self.logits = distribute_tensor(self.plain, self.mesh, [Shard(1)])
        self.targets: Any = distribute_tensor(torch.arange(4, device=rank.device), self.mesh, [Replicate()])
        self.sequences: list[torch.Tensor] = []  # of the blocks of context_parallel, from the outside inwards
        self.device = rank.device

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share the rows of a new tensor among the ranks."""
        self.sequences.append(torch.arange(8, device=self.device))
        try:
            with context_parallel(self.mesh, buffers=[self.sequences[-1]], buffer_seq_dims=[0]):
                yield
        finally:
            assert self.sequences.pop().tolist() == list(range(8))

    def loss_of_shards(self) -> bool:
        """Say whether a loss gathers nothing."""
        with ExplicitRedistributionContext(enable=False), CommDebugMode() as counts:
            nn.functional.cross_entropy(self.logits, self.targets)
        return not any("gather" in str(op) for op in counts.get_comm_counts())

    def replicates(self) -> bool:
        """Say whether a plain tensor beside a DTensor is taken for a replicated one."""
        return works(lambda: self.rows + self.plain)

    def refuses(self) -> bool:
        """Say whether an operator that has to redistribute an input is refused."""
        return not works(lambda: self.rows @ self.rows)

    def in_effect(self) -> list[Any]:
        """Say which kinds of blocks are in effect."""
        found = [
            self.replicates(),
            self.refuses(),
            self.loss_of_shards(),
            works(lambda: distribute_tensor(self.plain, src_data_rank=None)),
        ]
        return [*found, [len(each) for each in self.sequences]]

    def expected(self, names: list[str]) -> list[Any]:
        """Say which are, from the outside inwards."""
        explicit = [name for name in names if name in ("ExplicitRedistributionContext", "no redistribution")]
        return [
            "implicit_replication" in names,
            explicit[-1:] == ["ExplicitRedistributionContext"],
            "loss_parallel" in names,
            "mesh" in names,
            [4] * names.count("context_parallel"),
        ]


KINDS: dict[str, Callable[[Blocks], AbstractContextManager[Any]]] = {
    "implicit_replication": lambda blocks: implicit_replication(),
    "ExplicitRedistributionContext": lambda blocks: ExplicitRedistributionContext(),
    "no redistribution": lambda blocks: ExplicitRedistributionContext(enable=False),
    "loss_parallel": lambda blocks: loss_parallel(),
    "context_parallel": lambda blocks: blocks.shared(),
    "mesh": lambda blocks: blocks.mesh,
}
OTHERS = "implicit_replication", "loss_parallel"
"""Kinds with tests of their own of blocks within blocks of the same kind."""
NESTS: dict[str, list[tuple[str, ...]]] = {
    outer: [
        (outer, inner) if outer in OTHERS else (outer, inner, outer)
        for inner in KINDS
        if (inner != outer or outer not in OTHERS) and (outer, inner) != ("context_parallel", "loss_parallel")
    ]
    for outer in KINDS
}
NESTS["loss_parallel in context_parallel"] = [("context_parallel", "loss_parallel", "context_parallel")]
"""Blocks from the outside inwards."""


@requirement(
    "TP-CONTEXT-9400",
    "A block of DTensor's contexts has its own effect until it ends, whatever blocks of other kinds are around it.",
    source="torch.distributed.tensor.experimental: implicit_replication, context_parallel; "
    "torch.distributed.tensor.parallel.loss_parallel; torch/distributed/tensor/_utils.py: "
    "ExplicitRedistributionContext; torch.distributed.device_mesh.DeviceMesh",
)
@pytest.mark.parametrize("outer", NESTS)
@pytest.mark.world(2)
def test_blocks_of_kinds(world: World, outer: str) -> None:
    """Enter each kind in a block, and the first kind in that again, leave most by an error, and look at each step."""

    def body(rank: Rank) -> None:
        blocks = Blocks(rank)

        def check(*names: str) -> None:
            assert blocks.in_effect() == blocks.expected(list(names)), names

        def enter(names: tuple[str, ...], *entered: str) -> None:
            check(*entered)
            if names:
                # an error leaves a loss_parallel in effect, and before 2.13 a context_parallel, too
                error = "loss_parallel" not in names and (runs_with(">=2.13") or "context_parallel" not in names)
                with pytest.raises(KeyError) if error else nullcontext(), KINDS[names[0]](blocks):
                    enter(names[1:], *entered, names[0])
                    if error:
                        raise KeyError
                check(*entered)

        for names in NESTS[outer]:
            enter(names)

    world.run(body)


@requirement(
    "TP-CONTEXT-9401",
    "A block of DTensor's contexts in one thread has its effect until it ends, whatever others enter or leave.",
    source="torch.distributed.tensor.experimental.implicit_replication; torch/distributed/tensor/_utils.py: "
    "ExplicitRedistributionContext: threading.local",
)
@pytest.mark.parametrize("kind", [*KINDS][:3])
@pytest.mark.world(2)
def test_blocks_of_threads(world: World, kind: str) -> None:
    """Two threads enter and leave in both orders, by an error or without, twice."""

    def body(rank: Rank) -> None:
        blocks = Blocks(rank)
        effect = blocks.replicates if kind == "implicit_replication" else blocks.refuses
        right = kind != "no redistribution"

        with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
            run = {0: first, 1: second}
            for (one, other), error in itertools.product(((0, 1), (1, 0)), (None, KeyError)):
                entered = [KINDS[kind](blocks) for _ in range(2)]

                def leave(number: int, entered: Any = entered, error: Any = error) -> None:
                    with pytest.raises(error) if error else nullcontext():
                        if not entered[number].__exit__(error, error and error(), None) and error:
                            raise error

                run[0].submit(entered[0].__enter__).result()
                run[1].submit(entered[1].__enter__).result()
                assert [run[i].submit(effect).result() for i in range(2)] == [right] * 2, (one, error)
                run[one].submit(leave, one).result()
                assert run[other].submit(effect).result() == right, (one, error)
                run[other].submit(leave, other).result()
                found = [run[i].submit(effect).result() for i in range(2)]
                assert [*found, effect()] == [False] * 3, (one, error)

    world.run(body)


@requirement(
    "TP-COMM-9402",
    "A CommDebugMode counts all collectives in its block, also those in blocks within it, and none outside of it.",
    source="torch.distributed.tensor.debug.CommDebugMode: 'counts the number of functional collectives within its "
    "context'",
)
@requirement(
    "TP-COMM-9403",
    "A CommDebugMode that is entered again counts from zero.",
    source="torch.distributed.tensor.debug.CommDebugMode: __enter__",
)
@pytest.mark.parametrize("error", [False, True], ids=["ended", "by an error"])
@pytest.mark.world(2)
def test_counting_blocks(world: World, error: bool) -> None:
    """Nest three modes, each of which is used again around the others, and gather in modules between all ends."""

    class Gather(nn.Module):
        """A module that gathers its input, and a class of its own for each name."""

        def forward(self, x: DTensor) -> torch.Tensor:
            """Gather a DTensor."""
            return x.full_tensor()

    def body(rank: Rank) -> None:
        rows = distribute_tensor(floats(4, 4).to(rank.device), rank.mesh(), [Shard(0)])
        modes = [CommDebugMode() for _ in range(3)]
        due: list[list[str]] = [[], [], []]
        names = iter(range(1000))

        def gather(*entered: int) -> None:
            name = f"Gather{next(names)}"
            type(name, (Gather,), {})()(rows)
            for number in entered:
                due[number].append(name)
            for number, mode in enumerate(modes):
                what = f"mode {number} in {entered}"
                assert mode.get_total_counts() == len(due[number]), what
                counts = {of: sum(each["forward"].values()) for of, each in mode.comm_module_counts.items()}
                total = counts.pop("Global", 0)
                assert (total, counts) == (len(due[number]), dict.fromkeys(due[number], 1)), what

        def enter(numbers: tuple[int, ...], *entered: int) -> None:
            gather(*entered)
            if numbers:
                due[numbers[0]].clear()
                with pytest.raises(KeyError) if error else nullcontext(), modes[numbers[0]] as given:
                    assert given is modes[numbers[0]]
                    enter(numbers[1:], *entered, numbers[0])
                    if error:
                        raise KeyError
                gather(*entered)

        for numbers in ((0, 1, 2), (1, 0, 2), (2, 1, 0), (0,), (1, 2)):
            enter(numbers)

    world.run(body)
