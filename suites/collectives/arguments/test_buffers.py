"""Tensors that are parts of one buffer, as training engines lay them out, and the release of tensors."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fixtures.memory import held, held_less_than
from fixtures.tensors import moved
from harness import Rank, World, assert_same, requirement, spmd
from harness.oracles.collectives import COLLECTIVES, IN_PLACE, REDUCING, Case, inputs, outputs
from harness.stacks.collectives import coalescing_manager, functional, issue, issue_in


@requirement(
    "COLL-BUFFER-01",
    "The tensors of a list may be views of one buffer.",
    source="torch.distributed.all_gather, gather, scatter, reduce_scatter, all_to_all",
)
@pytest.mark.parametrize("collective", ["all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"])
@pytest.mark.world(2, 3, 4)
def test_lists_of_parts(world: World, collective: str) -> None:
    """Each list has all of one buffer, or views with guard elements around or also between them, in every order."""

    def parts(
        tensors: list[torch.Tensor], guard: int, gap: int, order: tuple[int, ...], device: torch.device
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        around, between = torch.full((guard,), -7.0), torch.full((gap,), -7.0)
        places = [i for i in order if i < len(tensors)]
        buffer = torch.cat([around, *(piece for i in places for piece in (tensors[i], between)), around]).to(device)
        views = {}
        start = guard
        for i in places:
            views[i] = buffer[start : start + tensors[i].numel()]
            start += tensors[i].numel() + gap
        return buffer, [views[i] for i in range(len(tensors))]

    def body(rank: Rank) -> None:
        orders = list(itertools.permutations(range(rank.size)))
        orders = orders if rank.size < 4 else [*orders[:3], *orders[-3:]]
        for call, ((guard, gap), order) in enumerate(itertools.product(((0, 0), (1, 0), (1, 3)), orders)):
            case = Case(collective, shape=(5,), form="async")
            expected = outputs(case, rank.size, rank.index, call)
            _, given = parts(inputs(case, rank.size, rank.index, call), guard, gap, order, rank.device)
            blank = [torch.full_like(right, -1) for right in expected]
            buffer, results = parts(blank, guard, gap, order, rank.device)
            issue(case, given, results, None).wait()
            whole, _ = parts(expected, guard, gap, order, torch.device("cpu"))
            assert_same(whole, buffer, f"{case}, {guard} elements around, {gap} between, {order} in memory")

    world.run(body)


@requirement(
    "COLL-BUFFER-02",
    "The input of all_gather_into_tensor may be the rank's own chunk of its output.",
    source="torch.distributed.all_gather_into_tensor, as torch.distributed.fsdp.fully_shard calls it",
)
@pytest.mark.needs(collective="all_gather_into_tensor")
@spmd(1, 2, 3)
def test_gathering_in_place(rank: Rank) -> None:
    """Each rank fills its own chunk of the output buffer; two calls."""
    for call in range(2):
        case = Case("all_gather_into_tensor", shape=(5,))
        (right,) = outputs(case, rank.size, rank.index, call)
        buffer = torch.full_like(right, -1, device=rank.device)
        mine = buffer.chunk(rank.size)[rank.index]
        mine.copy_(inputs(case, rank.size, rank.index, call)[0])
        dist.all_gather_into_tensor(buffer, mine)
        assert_same(right, buffer, f"call {call}")


@requirement(
    "COLL-BUFFER-03",
    "The output of reduce_scatter_tensor may be the rank's own chunk of its input.",
    source="torch.distributed.reduce_scatter_tensor; NCCL, in-place operations",
)
@spmd(1, 2, 3)
def test_scattering_in_place(rank: Rank) -> None:
    """The reduction overwrites the rank's own chunk; two calls."""
    for call in range(2):
        case = Case("reduce_scatter_tensor", shape=(5,))
        (buffer,) = moved(inputs(case, rank.size, rank.index, call), rank.device)
        mine = buffer.chunk(rank.size)[rank.index]
        dist.reduce_scatter_tensor(mine, buffer)
        assert_same(outputs(case, rank.size, rank.index, call)[0], mine, f"call {call}")


@requirement(
    "COLL-BUFFER-04",
    "The input of all_gather may be the rank's own tensor of the output list.",
    source="torch.distributed.all_gather",
)
@spmd(1, 2, 3)
def test_own_slot(rank: Rank) -> None:
    """The input is the tensor at the rank's own index of the output list; two calls."""
    for call in range(2):
        case = Case("all_gather", shape=(5,))
        expected = outputs(case, rank.size, rank.index, call)
        results = [torch.full_like(right, -1, device=rank.device) for right in expected]
        results[rank.index] = inputs(case, rank.size, rank.index, call)[0].to(rank.device)
        dist.all_gather(results, results[rank.index])
        for sender, (right, out) in enumerate(zip(expected, results, strict=True)):
            assert_same(right, out, f"from rank {sender}, call {call}")


@requirement(
    "COLL-BUFFER-7100",
    "A collective that is called again with the same tensors gives the result of what they hold then.",
    source="torch.distributed: its collectives",
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(3)
def test_same_tensors_again(world: World, collective: str) -> None:
    """Call with the same numbers twice and with others, blocking or not; in between, the results are overwritten."""

    def body(rank: Rank) -> None:
        for shape, asynchronous in itertools.product(((5,), (700, 2)), (False, True)):
            case = Case(collective, shape=shape)
            given = moved(inputs(case, rank.size, rank.index), rank.device)
            results = given
            if collective not in IN_PLACE:
                rights = outputs(case, rank.size, rank.index)
                results = [torch.empty_like(right, device=rank.device) for right in rights]
            options = {"op": dist.ReduceOp.SUM} if collective in REDUCING else {}
            call = issue_in(case, given, results, {"async_op": asynchronous, **options}, range(rank.size))
            for number, data in enumerate((0, 0, 1, 1)):
                for tensor in results:
                    tensor.fill_(-1)
                sent = inputs(case, rank.size, rank.index, data)
                for tensor, value in zip(given, sent, strict=True):
                    tensor.copy_(value)
                work = call()
                if work is not None:
                    work.wait()
                for right, out in zip(outputs(case, rank.size, rank.index, data), results, strict=False):
                    assert_same(right, out, f"call {number}, {shape}, {asynchronous=}")
                if collective not in IN_PLACE:
                    for value, tensor in zip(sent, given, strict=True):
                        assert_same(value, tensor, f"input of call {number}, {shape}, {asynchronous=}")

    world.run(body)


@requirement(
    "COLL-KIND-01",
    "Collectives accept parameters and tensors created in inference mode.",
    source="torch.nn.Parameter, torch.inference_mode",
)
@pytest.mark.parametrize("kind", ["parameter", "inference"])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(2)
def test_kinds_of_tensors(world: World, collective: str, kind: str) -> None:
    """Inputs and outputs are of that kind, and gradients are not recorded."""

    def body(rank: Rank) -> None:
        case = Case(collective, form="async")
        with torch.inference_mode() if kind == "inference" else torch.no_grad():
            expected = outputs(case, rank.size, rank.index)
            given = [tensor.to(rank.device, copy=True) for tensor in inputs(case, rank.size, rank.index)]
            results = [torch.full_like(right, -1, device=rank.device) for right in expected]
            if kind == "parameter":
                given, results = ([torch.nn.Parameter(tensor) for tensor in tensors] for tensors in (given, results))
            results = given if collective in IN_PLACE else results
            issue(case, given, results, None).wait()
            for right, out in zip(expected, results, strict=False):  # reduce has a result only on its root
                assert_same(right, out.detach(), str(case))

    world.run(body)


@requirement(
    "COLL-FREE-01",
    "Once a collective is done and its Work is released, nothing keeps its tensors alive for long.",
    source="torch.distributed: collectives do not own tensors",
)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.world(2)
def test_tensors_are_freed(world: World, collective: str) -> None:
    """Of a dozen calls, a backend may still hold the tensors of a few."""

    def body(rank: Rank) -> None:
        def call() -> list[Any]:
            case = Case(collective, form="async")
            given = moved(inputs(case, rank.size, rank.index), rank.device)
            results = [torch.zeros_like(right, device=rank.device) for right in outputs(case, rank.size, rank.index)]
            results = given if collective in IN_PLACE else results
            issue(case, given, results, None).wait()
            return [weakref.ref(tensor) for tensor in (*given, *results)]

        assert_freed([call() for _ in range(12)])

    world.run(body)


USES: dict[str, Callable[[Any], Any]] = {
    "waited-for": functional.wait_tensor,
    "used": lambda result: result + 1,
    "waited-for by its method": lambda result: result.wait(),
    "viewed and used": lambda result: result.view(-1) + 1,
    "numbers": lambda result: result.tolist(),
    "an array": lambda result: result.cpu().numpy().sum(),
    "text": repr,
}
"""What a program does with the result of a functional collective."""


@requirement(
    "COLL-FREE-02",
    "Once the result of a functional collective is released, nothing keeps the result or the input alive.",
    source="torch.distributed._functional_collectives: AsyncCollectiveTensor, wait_tensor",
)
@pytest.mark.parametrize("way", USES)
@spmd(2)
def test_functional_results_are_freed(rank: Rank, way: str) -> None:
    """Results of all_reduce and all_gather are waited for in each way, or by their first use."""

    def call(given: torch.Tensor) -> list[Any]:
        results = [functional.all_reduce(given, "sum", rank.group), functional.all_gather_tensor(given, 0, rank.group)]
        used = [USES[way](result) for result in results]
        tensors = [tensor for tensor in (given, *results, *used) if isinstance(tensor, torch.Tensor)]
        return [weakref.ref(tensor) for tensor in tensors]

    assert_freed([call(torch.full((5,), float(number), device=rank.device)) for number in range(12)])


@requirement(
    "COLL-FREE-03",
    "Once a message has arrived and its Work is released, nothing keeps its tensor alive for long.",
    source="torch.distributed.send, recv, isend, irecv, batch_isend_irecv, P2POp",
)
@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param(how, marks=pytest.mark.needs(features=["messages"])) for how in ("blocking", "async", "batch")),
        pytest.param("any-source", marks=pytest.mark.needs(features=["messages", "any_source"])),
    ],
)
@spmd(2)
def test_messages_are_freed(rank: Rank, how: str) -> None:
    """Rank 0 sends a dozen messages to rank 1, and every rank keeps none."""

    def call(tensor: torch.Tensor) -> list[Any]:
        sends, other = rank.index == 0, 1 - rank.index
        if how == "async":
            (dist.isend if sends else dist.irecv)(tensor, other).wait()  # type: ignore[union-attr]
        elif how == "batch":
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend if sends else dist.irecv, tensor, other)]):
                work.wait()
        elif sends:
            dist.send(tensor, other)
        else:
            dist.recv(tensor, other if how == "blocking" else None)
        return [weakref.ref(tensor)]

    assert_freed([call(torch.full((5,), float(number), device=rank.device)) for number in range(12)])


@requirement(
    "COLL-FREE-04",
    "Once coalesced collectives are done and their manager is released, nothing keeps their tensors alive for long.",
    source="torch.distributed: _coalescing_manager; torch.distributed.all_reduce_coalesced",
)
@pytest.mark.needs(features=["coalescing"])
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "list"])
@spmd(2)
def test_coalesced_tensors_are_freed(rank: Rank, collective: str) -> None:
    """Of a dozen blocks of two calls, half are waited for by the block itself."""

    def call(number: int) -> list[Any]:
        small = [torch.full((2,), float(number), device=rank.device) for _ in range(2)]
        large = [torch.full((4,), float(number), device=rank.device) for _ in range(2)]
        if collective == "list":
            dist.all_reduce_coalesced(small)
            return [weakref.ref(tensor) for tensor in small]
        pairs = zip(large, small, strict=True) if "gather" in collective else zip(small, large, strict=True)
        with coalescing_manager(async_ops=bool(number % 2)) as manager:
            for out, given in pairs:
                getattr(dist, collective)(*((out,) if collective == "all_reduce" else (out, given)))
        manager.wait()
        return [weakref.ref(tensor) for tensor in (*small, *large)]

    assert_freed([call(number) for number in range(12)])


@requirement(
    "COLL-FREE-05",
    "Once a collective of objects has returned, nothing keeps the objects alive that were given to it.",
    source="torch.distributed.all_gather_object, broadcast_object_list, gather_object, scatter_object_list",
)
@pytest.mark.needs(features=["objects"])
@spmd(2)
def test_objects_are_freed(rank: Rank) -> None:
    """Give objects a dozen times to each, and release the lists."""

    def call(number: int) -> list[Any]:
        given = [torch.full((2,), float(number)) for _ in range(2)]
        gathered: list[Any] = [None, None]
        mine: list[Any] = [None]
        dist.all_gather_object(gathered, given[0])
        references = [weakref.ref(tensor) for tensor in (*given, *gathered)]
        dist.gather_object(given[0], gathered if rank.index == 0 else None)
        dist.scatter_object_list(mine, list(given) if rank.index == 0 else None)
        references += [weakref.ref(tensor) for tensor in (*gathered, *mine)]
        dist.broadcast_object_list(given)
        return references + [weakref.ref(tensor) for tensor in given]

    assert_freed([call(number) for number in range(12)])


@requirement(
    "COLL-FREE-4805",
    "Once a collective of objects has returned, it keeps no memory for the messages, whatever their sizes.",
    source="torch.distributed.all_gather_object, broadcast_object_list, gather_object, scatter_object_list, "
    "send_object_list, recv_object_list",
)
@pytest.mark.needs(features=["objects"])
@spmd(2)
def test_memory_of_messages(rank: Rank) -> None:
    """Send objects of seven sizes with each, and count the bytes of all tensors before and after."""

    def messages(number: int) -> None:
        text = "x" * (50_000 + 1000 * number + rank.index)
        dist.all_gather_object([None, None], text)
        dist.gather_object(text, [None, None] if rank.index == 0 else None)
        dist.scatter_object_list([None], [text, text] if rank.index == 0 else None)
        dist.broadcast_object_list([text if rank.index == 0 else None])
        if rank.index == 0:
            dist.send_object_list([text], 1)
        else:
            dist.recv_object_list([None], 0)

    before = held()
    for number in range(7):
        messages(number)
    assert held_less_than(before + 50_000, within=10) - before < 50_000


@requirement(
    "COLL-FREE-6001",
    "A collective of objects takes at most six times the memory that the pickled objects of a call have.",
    source="torch.distributed.all_gather_object, broadcast_object_list, gather_object, scatter_object_list, "
    "send_object_list, recv_object_list: objects are pickled to tensors of bytes",
)
@pytest.mark.needs(features=["objects"])
@spmd(2)
def test_peak_of_messages(rank: Rank) -> None:
    """Measure what Python allocates while each moves a text."""
    text, peaks, here = "x" * 400_000, {}, rank.index == 0
    calls: dict[str, Any] = {
        "all_gather_object": lambda: dist.all_gather_object([None, None], text),
        "gather_object": lambda: dist.gather_object(text, [None, None] if here else None),
        "broadcast_object_list": lambda: dist.broadcast_object_list([text if here else None]),
        "scatter_object_list": lambda: dist.scatter_object_list([None], [text, "short"] if here else None),
        "send_object_list": lambda: dist.send_object_list([text], 1) if here else dist.recv_object_list([None], 0),
    }
    for name, call in calls.items():
        call()
        tracemalloc.start()
        call()
        peaks[name] = tracemalloc.get_traced_memory()[1] / len(text)
        tracemalloc.stop()
    assert max(peaks.values()) < 6, f"times the text: {peaks}"


def assert_freed(calls: list[list[Any]]) -> None:
    """Assert that at most three of a dozen calls still hold tensors when every rank is here.

    It allows three because a backend's threads may be slow.
    """
    dist.barrier()
    gc.collect()
    alive = [
        number for number, references in enumerate(calls) if any(reference() is not None for reference in references)
    ]
    assert len(alive) <= 3, f"of {len(calls)} calls, these still have tensors: {alive}"
