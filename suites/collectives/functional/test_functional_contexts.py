"""Functional collectives where nothing is as usual: in inference mode, of tensors without data, in other threads."""

from __future__ import annotations

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_same, requirement, spmd
from harness.stacks.collectives import functional, unwaited
from harness.stacks.limit import runs_with
from harness.stacks.pretended import FakeTensorMode
from harness.stacks.training import launched, since
from suites.collectives.functional.test_functional_results import READ

Call = Callable[[torch.Tensor, Any], Any]

OF_ANY_LAYOUT: dict[str, Call] = {
    "all_reduce": lambda x, g: functional.all_reduce(x, "sum", g),
    "gathered rows": lambda x, g: functional.all_gather_tensor(x, 0, g),
    "gathered columns": lambda x, g: functional.all_gather_tensor(x, 1, g),
    "scattered rows": lambda x, g: functional.reduce_scatter_tensor(x, "sum", 0, g),
    "scattered columns": lambda x, g: functional.reduce_scatter_tensor(x, "sum", 1, g),
    "exchanged": lambda x, g: functional.all_to_all_single(x, None, None, g),
    "gathered list": lambda x, g: functional.all_gather_into_tensor_coalesced([x, x[:2]], g),
    "scattered list": lambda x, g: functional.reduce_scatter_tensor_coalesced([x, x[:2]], "sum", [0, 1], g),
}
"""Functional collectives of four rows and two columns, on two ranks."""

OF_ROWS: dict[str, Call] = {
    "broadcast": lambda x, g: functional.broadcast(x, 0, g),
    "reduced list": lambda x, g: functional.all_reduce_coalesced([x, x[:2]], "sum", g),
    "exchanged unevenly": lambda x, g: functional.all_to_all_single(x, [2, 2], [2, 2], g),
    "permuted": lambda x, g: functional.permute_tensor(x.view(-1), [1, 0], g),
}
"""Those whose strides are promised for contiguous tensors only."""

CALLS = OF_ANY_LAYOUT | OF_ROWS


def each(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@requirement(
    "COLL-FUNC-33",
    "In inference mode, too, a functional collective is waited for before its result is read, in any way of reading "
    "it.",
    source="torch.distributed._functional_collectives: AsyncCollectiveTensor; torch.inference_mode; "
    "pytorch/pytorch#133421",
)
@pytest.mark.needs(collective="all_reduce")
@spmd(2)
def test_in_inference_mode(rank: Rank) -> None:
    """Read a sum in every way, and the result of each collective as another dtype; inputs are of that mode or not."""
    group: Any = dist.group.WORLD
    ways = {name: read for name, read in READ.items() if rank.device.type == "cpu" or "numpy" not in name}
    outside = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=rank.device) * (1 + rank.index * 10)
    with torch.inference_mode():
        for name, read in ways.items():
            for given in (outside, outside.clone()):
                total = functional.all_reduce(given, "sum", group)
                assert read(total) == [[12.0, 24.0], [36.0, 48.0]], name
                assert unwaited() == 0, f"{name}: nothing has waited for the collective"
        x = torch.arange(8.0, device=rank.device).view(4, 2) + 100 * rank.index
        for name, call in CALLS.items():
            right = [functional.wait_tensor(result).clone() for result in each(call(x, group))]
            found = [result.to(torch.float64) for result in each(call(x, group))]
            assert unwaited() == 0, f"{name}: nothing has waited for the collective"
            for one, other in zip(right, found, strict=True):
                assert type(other) is torch.Tensor, name
                assert_same(one.double().cpu(), other, name)


def facts(result: torch.Tensor) -> tuple[Any, ...]:
    return tuple(result.shape), result.stride(), result.dtype, result.requires_grad, result.storage_offset()


@requirement(
    "COLL-FUNC-34",
    "A functional collective of meta or fake tensors has results with the shapes, strides, dtypes of real ones, and "
    "launches nothing.",
    source="torch/distributed/_functional_collectives.py: the functions registered for Meta; "
    "FakeTensorMode; test_functional_api.py: TestMetaCollectives",
)
@spmd(2)
def test_without_data(rank: Rank) -> None:
    """Give tensors of two dtypes, contiguous or strided, with and without a gradient, and an empty one."""
    group: Any = dist.group.WORLD
    base = torch.arange(16.0, device=rank.device)
    layouts = {
        "contiguous": base[:8].view(4, 2),
        "transposed": base[:8].view(2, 4).t(),
        "every second column": base[:16].view(4, 4)[:, ::2],
        "empty": base[:0].view(4, 0),
    }
    for layout, tensor in layouts.items():
        if runs_with("<2.12") and not tensor.is_contiguous():  # which most of them refuse there
            continue
        calls = CALLS if layout in ("contiguous", "empty") else OF_ANY_LAYOUT
        kinds_of_data = ((torch.float32, False), (torch.bfloat16, True))
        for dtype, needs in kinds_of_data if layout == "contiguous" else kinds_of_data[1:]:
            x = tensor.to(dtype).as_strided(tensor.size(), tensor.to(dtype).stride()).requires_grad_(needs)
            right, gradients = {}, {}
            for name, call in calls.items():
                leaf = x.detach().requires_grad_(needs)
                results = each(call(leaf, group))
                right[name] = [facts(result) for result in results]
                if needs and name != "broadcast":  # which has no gradient without data
                    sum(result.sum() for result in results).backward()  # type: ignore[union-attr]
                    assert leaf.grad is not None
                    gradients[name] = (leaf.grad.shape, leaf.grad.dtype)
                for result in results:
                    functional.wait_tensor(result.detach())
            mode, plain = FakeTensorMode(), x.detach()
            kinds: dict[str, Callable[[], torch.Tensor]] = {
                "meta": lambda x=x: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta"),
                "faked": lambda plain=plain, mode=mode: mode.from_tensor(plain),
            }
            for kind, make in kinds.items():
                for name, call in calls.items():
                    what = f"{name} of a tensor that is {kind}, {layout}, {dtype}"
                    before = launched()
                    with mode if kind == "faked" else torch.enable_grad():
                        leaf = make().requires_grad_(needs)
                        results = each(call(leaf, group))
                        assert [facts(result) for result in results] == right[name], what
                        assert {result.device for result in results} == {leaf.device}, what
                        if name in gradients:
                            sum(result.sum() for result in results).backward()  # type: ignore[union-attr]
                            assert leaf.grad is not None, what
                            assert (leaf.grad.shape, leaf.grad.dtype) == gradients[name], what
                    assert since(before) == {}, what
                    assert unwaited() == 0, what


@requirement(
    "COLL-THREAD-02",
    "Functional collectives may be called, waited for or differentiated in another thread than the one that made their "
    "group.",
    source="torch.distributed._functional_collectives; test_c10d_functional_native.py: "
    "test_wait_tensor_cross_thread, test_threading",
)
@pytest.mark.needs(features=["functional", "gradients"])
@spmd(2)
def test_in_other_threads(rank: Rank) -> None:
    """Call here and read there, call there and read here, and do both in new threads; name the group in every way."""
    everyone: Any = dist.group.WORLD
    groups: list[Any] = [everyone, everyone.group_name, rank.mesh(), (rank.mesh(1, 2), 1)]
    x = torch.arange(8.0, device=rank.device).view(4, 2) + 100 * rank.index

    def there(function: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(function).result()

    def read(results: list[torch.Tensor]) -> list[Any]:
        return [(result * 1).tolist() for result in results]

    for name, call in CALLS.items():
        right = read(each(call(x, everyone)))
        for group in groups:
            if name == "permuted" and isinstance(group, str):
                continue  # the only one that does not take a group's name
            here = each(call(x, group))
            assert there(lambda here=here: read(here)) == right, f"{name}, read in another thread"
            assert unwaited() == 0, f"{name}: the other thread has not waited"
            other = there(lambda call=call, group=group: each(call(x, group)))
            assert read(other) == right, f"{name}, called in another thread"
            assert unwaited() == 0, name
            assert there(lambda call=call, group=group: read(each(call(x, group)))) == right, f"{name}, in a thread"
            assert unwaited() == 0, name

        def differentiated(call: Call = call) -> Any:
            leaf = x.clone().requires_grad_()
            sum((result * (rank.index + 1)).sum() for result in each(call(leaf, everyone))).backward()  # type: ignore[union-attr]
            assert leaf.grad is not None
            return leaf.grad.tolist()

        assert there(differentiated) == differentiated(), f"gradient of {name}"
        assert unwaited() == 0, name


@requirement(
    "COLL-FUNC-35",
    "A functional collective waits for the Work of its backend once, when its result is used, and releases it then.",
    source="torch.distributed.Backend.register_backend; torch.distributed._functional_collectives: "
    "AsyncCollectiveTensor; test_c10d_functional_native.py: PyWorkTest",
)
@pytest.mark.world(1, warm=False)
def test_works_of_a_backend(world: World) -> None:
    """The backend is written in Python, and counts its works that are waited for and that are gone."""

    def body(rank: Rank) -> None:
        counts = {"waited": 0, "gone": 0}

        class Counted(dist.Work):
            def wait(self, timeout: timedelta | None = None) -> bool:
                counts["waited"] += 1
                return True

            def __del__(self) -> None:
                counts["gone"] += 1

        class Counting(dist.ProcessGroup):
            called: str

            def getBackendName(self) -> str:  # noqa: N802 - torch asks by this name
                return "counting"

            def setGroupName(self, name: str) -> None:  # noqa: N802
                self.called = name

            def getGroupName(self) -> str:  # noqa: N802
                return self.called

            def allreduce(self, tensors: Any, options: Any = None) -> Any:
                return Counted()

            def broadcast(self, tensors: Any, options: Any = None) -> Any:
                return Counted()

            def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
                return Counted()

            def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
                return Counted()

        def make(store: dist.Store, index: int, size: int, timeout: timedelta) -> Any:
            return Counting(index, size)

        dist.Backend.register_backend("counting", make, devices=[rank.device.type])
        group: Any = dist.new_group([0], backend="counting")
        calls = ("all_reduce", "broadcast", "gathered rows", "scattered rows", "scattered columns", "gathered columns")
        uses: dict[str, Callable[[Any], Any]] = {
            "wait": lambda t: t.wait() if hasattr(t, "wait") else t,
            "wait_tensor": functional.wait_tensor,
            "arithmetic": lambda t: t + 1,
            "view": lambda t: t.view(-1) + 1,
            "numbers": lambda t: t.tolist(),
        }
        x = torch.ones(4, 2, device=rank.device)
        for name in calls:
            for use, how in uses.items():
                counts.update(waited=0, gone=0)
                result = CALLS[name](x, group)
                gc.collect()
                if name != "gathered columns":  # which may have to wait before it can put them side by side
                    assert counts == {"waited": 0, "gone": 0}, f"{name}: before it is used"
                for _ in range(2):
                    how(result)
                    gc.collect()
                    assert counts == {"waited": 1, "gone": 1}, f"{name}, {use}"
        counts.update(waited=0, gone=0)
        dist.all_reduce(x, group=group)
        assert counts == {"waited": 1, "gone": 1}

    world.run(body)
