"""Results of functional collectives: however they are read, whatever their shape, and apart from their inputs."""

from __future__ import annotations

import itertools
import operator
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode

from fixtures.copying import reloaded
from harness import Rank, World, assert_same, requirement, spmd
from harness.oracles.collectives import Case
from harness.stacks.collectives import claimed_cases, functional, unwaited
from harness.stacks.limit import runs_with

READ: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda t: t.numpy().tolist(),
    "tolist": lambda t: t.tolist(),
    "item": lambda t: [[t[0, 0].item(), t[0, 1].item()], [t[1, 0].item(), t[1, 1].item()]],
    "iteration": lambda t: [[float(x) for x in row] for row in t],
    "wait": lambda t: t.wait().tolist(),  # type: ignore[attr-defined]
    "wait_tensor": lambda t: functional.wait_tensor(t).tolist(),  # type: ignore[no-untyped-call]
    "arithmetic": lambda t: (t * 1).tolist(),
    "in place": lambda t: t.add_(0).tolist(),
    "second operand": lambda t: (torch.zeros(2, 2, device=t.device) + t).tolist(),
    "list": lambda t: torch.stack([t])[0].tolist(),
    "copy_": lambda t: torch.zeros(2, 2, device=t.device).copy_(t).tolist(),
    "out": lambda t: torch.add(t, 0, out=torch.zeros(2, 2, device=t.device)).tolist(),
    "clone": lambda t: t.clone().tolist(),
    "host": lambda t: t.cpu().tolist(),
    "dtype": lambda t: t.double().tolist(),
    "view": lambda t: (t.view(4) + 0).view(2, 2).tolist(),
    "two views": lambda t: (t.view(4).view(2, 2) + 0).tolist(),
    "reshape": lambda t: (t.reshape(1, 4) + 0).reshape(2, 2).tolist(),
    "transpose": lambda t: (t.t() + 0).t().tolist(),
    "contiguous": lambda t: t.t().contiguous().view(4).view(2, 2).t().tolist(),
    "reshaped transpose": lambda t: (t.t().reshape(4) + 0).view(2, 2).t().tolist(),
    "slices": lambda t: [(t[0] + 0).tolist(), (t[1:] + 0)[0].tolist()],
    "chunks": lambda t: [(part + 0)[0].tolist() for part in t.chunk(2)],
    "unbind": lambda t: [(part + 0).tolist() for part in t.unbind()],
    "view of tolist": lambda t: t.view(4).view(2, 2).tolist(),
    "view of numpy": lambda t: t.view(2, 2).numpy().tolist(),
    "detach": lambda t: (t.detach() + 0).tolist(),
    "comparison": lambda t: torch.where(t == t.clone(), t, torch.zeros_like(t)).tolist(),
    "collective": lambda t: _broadcast(t),
    "repr": lambda t: _numbers(repr(t)),
    "str": lambda t: _numbers(str(t)),
    "format": lambda t: _numbers(f"{t}"),
}
"""Ways to read all numbers of a result of two rows and two columns."""


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "+=": lambda t: operator.iadd(t, 1),
    "*= by a tensor": lambda t: operator.imul(t, torch.full((2, 2), 3.0, device=t.device)),
    "fill_": lambda t: t.fill_(7),
    "zero_": lambda t: t.zero_(),
    "copy_": lambda t: t.copy_(torch.eye(2)),
    "out": lambda t: torch.add(t, 1, out=t),
    "an element": lambda t: operator.setitem(t, (0, 1), 9.0),
    "a row": lambda t: operator.setitem(t, 1, torch.tensor([5.0, 6.0], device=t.device)),
    "a mask": lambda t: operator.setitem(t, t > 3, 0.5),
    "masked_fill_": lambda t: t.masked_fill_(torch.eye(2, dtype=torch.bool, device=t.device), -1),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([1], device=t.device), torch.ones(1, 2, device=t.device)),
    "relu_": lambda t: torch.nn.functional.relu(t, inplace=True),
    "clamp_": lambda t: t.clamp_(min=0, max=5),
    "no_grad": lambda t: torch.no_grad()(t.neg_)(),
    "view": lambda t: t.view(4).add_(1),
    "transposed": lambda t: t.t().mul_(2),
    "column": lambda t: t[:, 1].sub_(1),
    "detached": lambda t: t.detach().mul_(3),
    "two": lambda t: t.add_(1).mul_(2),
}
"""Ways to change a tensor of two rows and two columns in place."""

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda t: t.view(-1),
    "view of three dimensions": lambda t: t.view(2, 1, -1),
    "row": lambda t: t[1],
    "rows": lambda t: t[1:],
    "every second row": lambda t: t[::2],
    "column": lambda t: t[:, 1],
    "columns": lambda t: t[:, :1],
    "part": lambda t: t[1:, 1:],
    "narrow": lambda t: t.narrow(1, 1, 1),
    "t": lambda t: t.t(),
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.permute(1, 0),
    "movedim": lambda t: t.movedim(0, 1),
    "mT": lambda t: t.mT,
    "unsqueeze": lambda t: t.unsqueeze(1),
    "expand": lambda t: t[:, None].expand(-1, 4, -1),
    "diagonal": lambda t: t.diagonal(),
    "unfold": lambda t: t.unfold(0, 2, 1),
    "chunk": lambda t: t.chunk(3)[1],
    "split": lambda t: t.split(1, 1)[1],
    "unbind": lambda t: t.unbind(1)[1],
    "column of transposed": lambda t: t.t()[1],
    "transposed twice": lambda t: t.t().t(),
    "transposed and transposed again": lambda t: t.view(3, -1, 2).transpose(0, 2).transpose(0, 1),
}
"""Views of a result of three or six rows and two columns."""


def _broadcast(t: torch.Tensor) -> Any:
    return functional.wait_tensor(functional.broadcast(t, 0, dist.group.WORLD)).tolist()  # type: ignore[no-untyped-call]


def _numbers(text: str) -> list[list[float]]:
    numbers = [float(x) for x in text[text.index("[[") : text.index("]]")].replace("[", "").replace("]", "").split(",")]
    return [numbers[:2], numbers[2:]]


@requirement(
    "COLL-FUNC-20",
    "A functional collective is waited for before its result is read, in any way of reading it.",
    source="torch.distributed._functional_collectives: AsyncCollectiveTensor: 'trigger a call to wait prior to first "
    "use of the underlying tensor'",
)
@pytest.mark.needs(collective="all_reduce")
@spmd(2)
def test_waits_however_it_is_read(rank: Rank) -> None:
    """Rank 1 comes late each time; the result is read on a rank that has waited for nothing else."""
    group: Any = dist.group.WORLD
    ways = {name: read for name, read in READ.items() if rank.device.type == "cpu" or "numpy" not in name}
    for number, (name, read) in enumerate(ways.items()):
        given = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=rank.device) * (1 + rank.index * 10)
        if rank.index == 1:
            rank.store.wait([f"read {number}"])
            time.sleep(0.01)  # enough to see a rank that does not wait
        total = functional.all_reduce(given, "sum", group)
        if rank.index == 0:
            rank.store.set(f"read {number}", "")
        assert read(total) == [[12.0, 24.0], [36.0, 48.0]], name
        assert unwaited() == 0, f"{name}: nothing has waited for the collective"


@requirement(
    "COLL-FUNC-20",
    "A functional collective is waited for before its result is read, in any way of reading it.",
    source="torch.distributed._functional_collectives: AsyncCollectiveTensor: 'trigger a call to wait prior to first "
    "use of the underlying tensor'",
)
@pytest.mark.needs(collective="all_reduce")
@spmd(2)
def test_waits_when_it_is_saved(rank: Rank) -> None:
    """Rank 1 comes late each time; rank 0 saves the result, alone or in a DTensor, and loads it again."""
    group: Any = dist.group.WORLD
    mesh, found = rank.mesh(2), {}

    def whole(t: torch.Tensor) -> Any:
        return DTensor.from_local(t, mesh, [Replicate()], run_check=False)

    ways: dict[str, Callable[[torch.Tensor], Any]] = {
        "pickle": lambda t: pickle.loads(pickle.dumps(t)),
        "torch.save": reloaded,
        "a DTensor": lambda t: reloaded(whole(t)).to_local(),
    }
    for number, (name, way) in enumerate(ways.items()):
        given = torch.tensor([1.0, 2.0], device=rank.device) * (1 + rank.index * 10)
        if rank.index == 1:
            rank.store.wait([f"save {number}"])
            time.sleep(0.1)  # enough to see a rank that does not wait
        total = functional.all_reduce(given, "sum", group)
        if rank.index == 0:
            rank.store.set(f"save {number}", "")
            found[name] = way(total).tolist()
        functional.wait_tensor(total)
    if rank.index == 0:
        assert found == {name: [12.0, 24.0] for name in ways}, f"saved before rank 1 came: {found}"


SHAPING: dict[str, Callable[[torch.Tensor], Any]] = {
    "t_": lambda t: t.t_(),
    "unsqueeze_": lambda t: t.unsqueeze_(1),
    "squeeze_": lambda t: t.squeeze_(0),
    "transpose_": lambda t: t.transpose_(0, 1),
}
"""Ways to change the shape of a tensor of one row and three columns in place."""


@requirement(
    "COLL-FUNC-32",
    "An in-place operation changes the result of a functional collective, also if it is the first use of it.",
    source="torch.distributed._functional_collectives: AsyncCollectiveTensor; torch.Tensor: in-place operations",
)
@pytest.mark.needs(collective="all_reduce")
@pytest.mark.parametrize("waited_for", [False, True], ids=["pending", "waited-for"])
@spmd(2)
def test_shaped_in_place(rank: Rank, waited_for: bool) -> None:
    """Change the shape of the sum of two rows, and ask for it and for the numbers."""
    group: Any = dist.group.WORLD
    found, rights = {}, {}
    for name, change in SHAPING.items():
        given = torch.tensor([[1.0, 2.0, 3.0]], device=rank.device)
        total, right = functional.all_reduce(given, "sum", group), 2 * given
        if waited_for:
            total = functional.wait_tensor(total)
        change(right)
        change(total)
        found[name], rights[name] = (list(total.shape), total.tolist()), (list(right.shape), right.tolist())
    assert found == rights, f"changed in place: {found}"


@requirement(
    "COLL-FUNC-32",
    "An in-place operation changes the result of a functional collective, also if it is the first use of it.",
    source="torch.distributed._functional_collectives: AsyncCollectiveTensor; torch.Tensor: in-place operations",
)
@pytest.mark.needs(collective="all_reduce")
@spmd(2)
def test_changed_in_place(rank: Rank) -> None:
    """Change the result of a sum in every way; results of every collective, of which there is a view before."""
    group: Any = dist.group.WORLD
    given = torch.tensor([[1.0, -2.0], [3.0, 4.0]], device=rank.device)
    for name, change in CHANGES.items():
        right = 2 * given
        total = functional.all_reduce(given, "sum", group)
        for turn in range(2):
            change(right)
            change(total)
            assert total.tolist() == right.tolist(), f"{name}, change {turn + 1}"
        assert_same(right.cpu(), functional.wait_tensor(total), name)
        assert unwaited() == 0, name
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: functional.all_reduce(given, "sum", group),
        "broadcast": lambda: functional.broadcast(given, 0, group),
        "all_gather": lambda: functional.all_gather_tensor(given, 0, group),
        "all_gather along 1": lambda: functional.all_gather_tensor(given, 1, group),
        "reduce_scatter": lambda: functional.reduce_scatter_tensor(given, "sum", 0, group),
        "reduce_scatter along 1": lambda: functional.reduce_scatter_tensor(given, "sum", 1, group),
        "all_to_all_single": lambda: functional.all_to_all_single(given, None, None, group),
        "permute": lambda: functional.permute_tensor(given.view(4), [1, 0], group),  # of a vector only
        "all_reduce_coalesced": lambda: functional.all_reduce_coalesced([given], "sum", group)[0],
        "all_gather_coalesced": lambda: functional.all_gather_into_tensor_coalesced([given], group)[0],
        "reduce_scatter_coalesced": lambda: functional.reduce_scatter_tensor_coalesced([given], "sum", [0], group)[0],
    }
    for name, call in calls.items():
        right = functional.wait_tensor(call()).clone() + 1
        pending = call()
        seen = pending.view(-1)
        pending.add_(1)
        assert_same(right.cpu(), functional.wait_tensor(pending), name)
        assert seen.tolist() == right.flatten().tolist(), f"{name}: a view"
    assert unwaited() == 0


@requirement(
    "COLL-FUNC-21",
    "Shape, dtype and device of a functional collective's result are known before the collective is done.",
    source="torch.distributed._functional_collectives: AsyncCollectiveTensor",
)
@pytest.mark.needs(collective="all_gather_into_tensor")
@pytest.mark.needs(collective="reduce_scatter_tensor")
@spmd(2)
def test_known_before(rank: Rank) -> None:
    """Rank 1 joins only after rank 0 has asked; metadata and views do not block."""
    group: Any = dist.group.WORLD
    for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64)):
        given = torch.ones(3, 2, dtype=dtype, device=rank.device)
        if rank.index == 1:
            rank.store.wait([f"asked {number}"])
        results = [functional.all_reduce(given, "sum", group), functional.all_gather_tensor(given, 0, group)]
        parts = [functional.reduce_scatter_tensor(given.repeat(2, 1), "sum", 0, group)]
        parts.append(functional.reduce_scatter_tensor(given.repeat(1, 2), "sum", 1, group))
        # needs no copy, so that nothing has to wait, as it does before 2.12
        wide = [functional.all_gather_tensor(given[:1], 1, group)] if runs_with(">=2.12") else []
        for one in wide:
            assert (one.shape, one.dtype, one.device, one.stride()) == ((1, 4), dtype, rank.device, (4, 1))
        for part in parts:
            assert (part.shape, part.dtype, part.device, part.stride()) == ((3, 2), dtype, rank.device, (2, 1))
            assert (part.view(-1).shape, part[1:].shape) == ((6,), (2, 2))
        for result, rows in zip(results, (3, 6), strict=True):
            assert (result.shape, result.dtype, result.device) == ((rows, 2), dtype, rank.device)
            assert (result.stride(), result.storage_offset(), result.requires_grad) == ((2, 1), 0, False)
            assert (result.view(-1).shape, result[1:].shape) == ((2 * rows,), (rows - 1, 2))
        if rank.index == 0:
            rank.store.set(f"asked {number}", "")
        assert_same(torch.full((3, 2), 2, dtype=dtype), functional.wait_tensor(results[0]), f"sum of {dtype}")
        assert_same(torch.full((6, 2), 1, dtype=dtype), functional.wait_tensor(results[1]), f"gathered {dtype}")
        for one in wide:
            assert_same(torch.full((1, 4), 1, dtype=dtype), functional.wait_tensor(one), f"gathered {dtype} along 1")
        for part in parts:
            assert_same(torch.full((3, 2), 2, dtype=dtype), functional.wait_tensor(part), f"scattered {dtype}")


@requirement(
    "COLL-FUNC-28",
    "A view of a functional collective's pending result has the shape, strides and place of that view of a tensor.",
    source="torch.distributed._functional_collectives: AsyncCollectiveTensor; torch.Tensor.view: views",
)
@pytest.mark.needs(collective="all_gather_into_tensor")
@spmd(2)
def test_views_known_before(rank: Rank) -> None:
    """Rank 1 joins only after rank 0 has asked for every view; afterwards all have the right elements."""
    group: Any = dist.group.WORLD
    given = torch.arange(6.0, device=rank.device).view(3, 2)
    if rank.index == 1:
        rank.store.wait(["views"])
    results = [functional.all_reduce(given, "sum", group), functional.all_gather_tensor(given, 0, group)]
    rights = [2 * given, torch.cat([given, given])]

    def told(t: torch.Tensor) -> tuple[Any, ...]:
        return t.shape, t.stride(), t.storage_offset(), t.is_contiguous(), t.dtype, t.requires_grad

    views = [{name: view(result) for name, view in VIEWS.items()} for result in results]
    before = [{name: told(pending) for name, pending in found.items()} for found in views]
    if rank.index == 0:
        rank.store.set("views", "")
    for found, said, right in zip(views, before, rights, strict=True):
        for name, pending in found.items():
            assert said[name] == told(VIEWS[name](right)), name
            assert pending.tolist() == VIEWS[name](right).tolist(), name
            assert pending.contiguous().view(-1).tolist() == VIEWS[name](right).flatten().tolist(), name


@requirement(
    "COLL-FUNC-22",
    "A functional gather or scatter is correct along any dimension of any shape, also where dimensions have size 1.",
    source="torch.distributed._functional_collectives: all_gather_tensor, reduce_scatter_tensor",
)
@requirement(
    "COLL-FUNC-30",
    "The result of a functional gather or scatter is contiguous, whatever the dimension and the input's strides.",
    source="torch.distributed._functional_collectives: all_gather_tensor, reduce_scatter_tensor",
)
@pytest.mark.needs(collective="all_gather_into_tensor")
@pytest.mark.needs(collective="reduce_scatter_tensor")
@pytest.mark.parametrize("ranks", [(0, 1, 2), (1, 2), (2,)], ids=str)
@pytest.mark.world(3)
def test_any_dimension(world: World, ranks: tuple[int, ...]) -> None:
    """Gather blocks of one to four dimensions of size 0 to 3, and scatter the sum of what was gathered."""
    shapes = [shape for n in (1, 2, 3) for shape in itertools.product((1, 2, 3), repeat=n)]
    shapes += [(1, 1, 2, 2), (1, 2, 1, 2), (2, 1, 1, 2), (1, 1, 1, 1), (2, 1, 2, 1), (0, 2), (2, 0), (1, 0, 2)]

    def body(rank: Rank) -> None:
        group: Any = dist.new_group(list(ranks))
        if rank.index not in ranks:
            return
        me, size = ranks.index(rank.index), len(ranks)
        for shape in shapes:
            count = torch.Size(shape).numel()
            blocks = [torch.arange(float(count)).view(shape) + 100 * i for i in range(size)]
            for dim in range(len(shape)):
                given = blocks[me].to(rank.device)
                if dim % 2:  # the same elements, with the strides of a transposed tensor
                    given = given.mT.contiguous().mT
                whole = functional.all_gather_tensor(given, dim, group)
                right = torch.cat(blocks, dim)
                assert whole.shape == right.shape, f"{shape} along {dim}"
                assert whole.stride() == right.stride(), f"{shape} along {dim}"
                assert whole.is_contiguous(), f"{shape} along {dim}"
                assert_same(right, functional.wait_tensor(whole), f"{shape} gathered along {dim}")
                assert_same(blocks[me], given, "input")
                part = functional.reduce_scatter_tensor(whole, "sum", dim, group)
                assert part.shape == shape, f"{shape} along {dim}"
                assert part.is_contiguous(), f"{shape} along {dim}"
                assert_same(size * blocks[me], functional.wait_tensor(part), f"{shape} scattered along {dim}")
                assert_same(right, functional.wait_tensor(whole), "input of the scatter")
        assert unwaited() == 0

    world.run(body)


@requirement(
    "COLL-FUNC-23",
    "The result of a functional collective has memory of its own, also in a group of one rank.",
    source="torch.distributed._functional_collectives: 'The input tensor is left unmodified'",
)
@pytest.mark.parametrize("alone", [False, True], ids=["together", "alone"])
@pytest.mark.world(2)
def test_own_memory(world: World, alone: bool) -> None:
    """Change the input after the collective, and the result after that."""

    def body(rank: Rank) -> None:
        ranks = [rank.index] if alone else [0, 1]
        groups = [dist.new_group([i]) for i in range(2)]
        group: Any = groups[rank.index] if alone else dist.group.WORLD
        size = len(ranks)
        calls: dict[str, Callable[[torch.Tensor], Any]] = {
            "all_reduce": lambda t: functional.all_reduce(t, "sum", group),
            "broadcast": lambda t: functional.broadcast(t, 0, group),
            "all_gather": lambda t: functional.all_gather_tensor(t, 0, group),
            "all_gather along 1": lambda t: functional.all_gather_tensor(t, 1, group),
            "reduce_scatter": lambda t: functional.reduce_scatter_tensor(t, "sum", 0, group),
            "reduce_scatter along 1": lambda t: functional.reduce_scatter_tensor(t, "sum", 1, group),
            "all_to_all_single": lambda t: functional.all_to_all_single(t, None, None, group),
            "permute": lambda t: functional.permute_tensor(t.view(4), list(range(size)), group),  # of a vector only
            "all_reduce_coalesced": lambda t: functional.all_reduce_coalesced([t], "sum", group)[0],
        }
        for name, call in calls.items():
            given = torch.ones(2, 2, device=rank.device)
            result = functional.wait_tensor(call(given))
            before = result.clone()
            given.fill_(7)
            assert_same(before.cpu(), result, f"{name}: result after the input has changed")
            result.fill_(9)
            assert_same(torch.full((2, 2), 7.0), given, f"{name}: input after the result has changed")

    world.run(body)


@requirement(
    "COLL-FUNC-24",
    "A functional collective refuses a shape that it cannot divide, an unknown operation and a group that is none.",
    source="torch.distributed._functional_collectives: reduce_scatter_tensor, all_reduce: group",
)
@spmd(2)
def test_refused_calls(rank: Rank) -> None:
    """Every rank is refused; afterwards each collective works, and none is left to be waited for."""
    group: Any = dist.group.WORLD
    mesh = rank.mesh(1, 2)
    tensor = torch.ones(3, 3, device=rank.device)
    wrong: dict[str, Callable[[], Any]] = {
        "rows": lambda: functional.reduce_scatter_tensor(tensor, "sum", 0, group),
        "columns": lambda: functional.reduce_scatter_tensor(tensor, "sum", 1, group),
        "operation": lambda: functional.all_reduce(tensor, "no operation", group),
        "number": lambda: functional.all_reduce(tensor, "sum", 3),  # type: ignore[arg-type]
        "none": lambda: functional.all_reduce(tensor, "sum", None),  # type: ignore[arg-type]
        "mesh of two dimensions": lambda: functional.all_reduce(tensor, "sum", mesh),
        "dimension of a mesh": lambda: functional.all_reduce(tensor, "sum", (mesh, 2)),
        "pair": lambda: functional.all_reduce(tensor, "sum", (group, 0)),  # type: ignore[arg-type]
        "uneven lists": lambda: functional.reduce_scatter_tensor_coalesced([tensor], "sum", [0], group),
    }
    for name, call in wrong.items():
        with pytest.raises((ValueError, TypeError, AssertionError, RuntimeError, IndexError, KeyError)):
            call()
        assert unwaited() == 0, name
    total = functional.wait_tensor(functional.all_reduce(tensor, "sum", (mesh, 1)))
    assert_same(torch.full((3, 3), 2.0), total, "sum")


@requirement(
    "COLL-FUNC-25",
    "A functional reduction accepts its operation by name, in small or capital letters.",
    source="torch.distributed._functional_collectives: all_reduce, reduce_scatter_tensor: reduceOp",
)
@pytest.mark.world(2)
def test_names_of_operations(world: World) -> None:
    """Reduce whole numbers and an average, one by one, scattered, in lists and in place, under every name of each."""
    values = {"sum": 9, "product": 18, "min": 3, "max": 6, "band": 2, "bor": 7, "bxor": 5, "avg": 4.5}
    dtypes = {name: torch.float32 if name == "avg" else torch.int64 for name in values}
    names = [case.op.lower() for case in claimed_cases([Case("all_reduce", op.upper(), dtypes[op]) for op in values])]
    kinds = ("tensor", "single", "tensor_autograd", "single_autograd", "tensor_coalesced", "single_coalesced")
    scattering = [f"reduce_scatter_{kind}" for kind in kinds if hasattr(functional, f"reduce_scatter_{kind}")]

    def body(rank: Rank) -> None:
        group: Any = dist.group.WORLD
        for name in names:
            right = torch.full((2,), values[name], dtype=dtypes[name])
            for op in (name, name.upper(), name.capitalize()):
                given = torch.full((2,), 3 + 3 * rank.index, dtype=dtypes[name], device=rank.device)
                results = [
                    functional.all_reduce(given, op, group),
                    *functional.all_reduce_coalesced([given, given], op, group),
                    *(
                        getattr(functional, form)([given.repeat(2)], op, [0], group)[0]
                        if form.endswith("coalesced")
                        else getattr(functional, form)(given.repeat(2), op, 0, group)
                        for form in scattering
                        if "autograd" not in form or name == "sum" or not runs_with("<2.13")  # only sums before
                    ),
                    functional.all_reduce_inplace(given.clone(), op, group),
                    functional.reduce_scatter_tensor_inplace(torch.zeros_like(given), given.repeat(2), op, group),
                ]
                if hasattr(functional, "reduce_scatter_inplace"):
                    results.append(functional.reduce_scatter_inplace(given.clone(), [given, given], op, group))
                for number, result in enumerate(results):
                    assert_same(right, functional.wait_tensor(result), f"{op}, result {number}")

    world.run(body)


@requirement(
    "COLL-FUNC-31",
    "A functional collective launches one collective, of its own kind, whatever its dimension.",
    source="torch.distributed._functional_collectives: its functions; torch.distributed.tensor.debug.CommDebugMode",
)
@spmd(2)
def test_launches_one(rank: Rank) -> None:
    """Count what each launches, for tensors with elements and without them, alone and in lists."""
    group: Any = dist.group.WORLD
    for shape in ((4, 4), (2, 6), (2, 0)):
        t = torch.ones(shape, device=rank.device)
        calls: dict[str, list[Callable[[], Any]]] = {
            "all_reduce": [lambda t=t: functional.all_reduce(t, "sum", group)],
            "broadcast": [lambda t=t: functional.broadcast(t, 1, group)],
            "all_gather_into_tensor": [
                lambda t=t, dim=dim: functional.all_gather_tensor(t, dim, group) for dim in (0, 1, -1)
            ],
            "reduce_scatter_tensor": [
                lambda t=t, dim=dim, op=op: functional.reduce_scatter_tensor(t, op, dim, group)
                for dim in (0, 1, -1)
                for op in ("sum", "max")
            ],
            "all_to_all_single": [
                lambda t=t: functional.all_to_all_single(t, None, None, group),
                lambda t=t: functional.permute_tensor(t.view(-1), [1, 0], group),
            ],
            "all_reduce_coalesced": [lambda t=t: functional.all_reduce_coalesced([t, t], "sum", group)],
            "all_gather_into_tensor_coalesced": [
                lambda t=t: functional.all_gather_into_tensor_coalesced([t, t, t], group)
            ],
            "reduce_scatter_tensor_coalesced": [
                lambda t=t, dims=dims: functional.reduce_scatter_tensor_coalesced([t, t], "sum", dims, group)
                for dims in ([0, 0], [0, 1], [1, -1])
            ],
        }
        for name, some in calls.items():
            for number, call in enumerate(some):
                with CommDebugMode() as mode:
                    results = call()
                counts = {str(kind).rpartition(".")[2]: count for kind, count in mode.get_comm_counts().items()}
                assert {kind: count for kind, count in counts.items() if count} == {name: 1}, f"call {number}"
                for result in results if isinstance(results, list) else [results]:
                    functional.wait_tensor(result)
    assert unwaited() == 0
