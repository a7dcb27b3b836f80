"""Debug levels: how they are set, and that collectives are the same at the highest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import Rank, World, assert_on_ranks, assert_same, requirement
from harness.oracles.collectives import Case
from harness.stacks.collectives import assert_right, claimed_cases, coalescing_manager, functional
from harness.stacks.limit import runs_with
from suites.collectives.cases import every_collective
from suites.collectives.operations.test_coalescing import calls

DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
MESSAGES = pytest.mark.needs(features=["messages"])


@requirement(
    "COLL-DEBUG-01",
    "TORCH_DISTRIBUTED_DEBUG is OFF, INFO or DETAIL in any case, OFF by default, and takes no other value.",
    source="torch.distributed: TORCH_DISTRIBUTED_DEBUG: 'OFF (default), INFO, or DETAIL'; get_debug_level, "
    "set_debug_level_from_env; test_c10d_common.py: test_debug_level",
)
@pytest.mark.world(1)
def test_levels(world: World) -> None:
    """Set the variable or the level, read the variable again, and ask for the level."""

    def body(rank: Rank) -> None:
        level = dist.DebugLevel
        before = dist.get_debug_level()
        with pytest.MonkeyPatch.context() as patch:
            for right in (level.OFF, level.INFO, level.DETAIL):
                for other in (level.OFF, level.INFO, level.DETAIL):
                    for name in (right.name, right.name.lower(), right.name.title(), right.name.swapcase()):
                        dist.set_debug_level(other)
                        assert dist.get_debug_level() == other
                        patch.setenv("TORCH_DISTRIBUTED_DEBUG", name)
                        assert dist.get_debug_level() == other
                        dist.set_debug_level_from_env()
                        assert dist.get_debug_level() == right, name
            for wrong in ("nothing", "0", "1", "2", "-1", "", "INFO ", "OFF,INFO"):
                dist.set_debug_level(level.INFO)
                patch.setenv("TORCH_DISTRIBUTED_DEBUG", wrong)
                with pytest.raises(ValueError, match="OFF, INFO, or DETAIL"):
                    dist.set_debug_level_from_env()
                assert dist.get_debug_level() == level.INFO, wrong
            patch.delenv("TORCH_DISTRIBUTED_DEBUG")
            dist.set_debug_level_from_env()
            assert dist.get_debug_level() == level.OFF
        dist.set_debug_level(before)

    world.run(body)


@requirement(
    "COLL-DEBUG-02",
    "At debug level DETAIL, every collective and message in the world or a group gives what it gives at any level.",
    source="torch.distributed: TORCH_DISTRIBUTED_DEBUG; pytorch/pytorch#109520; test_pg_wrapper.py: "
    "ProcessGroupGlooWrapperTest",
)
@pytest.mark.parametrize(
    "messages",
    ["none", *(pytest.param(how, marks=MESSAGES) for how in ("of all", "of two", "in a batch"))],
)
@pytest.mark.world(3, env=DETAIL)
def test_after_messages(world: World, messages: str) -> None:
    """Send in a circle of all ranks or from one rank to another, in the world or a group, then sum."""
    pairs = {"none": [], "of all": [(0, 1), (1, 2), (2, 0)]}.get(messages, [(0, 1)])

    def body(rank: Rank) -> list[Any]:
        found: list[Any] = []
        for group in (dist.group.WORLD, dist.new_group()):
            own = torch.tensor([10.0**rank.index], device=rank.device)
            into = torch.zeros_like(own)
            for pair in pairs:
                if rank.index not in pair:
                    continue
                here = pair.index(rank.index)
                call, tensor, other = (dist.isend, dist.irecv)[here], (own, into)[here], pair[1 - here]
                if messages == "in a batch":
                    for work in dist.batch_isend_irecv([dist.P2POp(call, tensor, other, group)]):
                        work.wait()
                else:
                    work = call(tensor, other, group=group)
                    assert work is not None
                    work.wait()
                assert here == 0 or into.item() == 10.0**other
            try:
                dist.all_reduce(own, group=group)
                found.append(own.item())
            except RuntimeError as e:
                found.append(str(e).partition(".")[0])
        return found

    assert_on_ranks([[111, 111]] * 3, world.run(body))


@requirement(
    "COLL-DEBUG-02",
    "At debug level DETAIL, every collective and message in the world or a group gives what it gives at any level.",
    source="torch.distributed: TORCH_DISTRIBUTED_DEBUG; pytorch/pytorch#109520; test_pg_wrapper.py: "
    "ProcessGroupGlooWrapperTest",
)
@pytest.mark.skipif(runs_with("<2.12"), reason="before 2.12, gloo lacks coalesced gathers into tensors")
@pytest.mark.needs(features=["coalescing", "functional", "messages", "objects"])
@pytest.mark.world(2, env=DETAIL)
def test_at_detail(world: World) -> None:
    """Call everything, in several forms: coalesced, functional, as lists, with objects and as methods."""
    cases = [case for form in ("sync", "async") for case in every_collective(form=form, root=1, repeats=2)]
    cases += [Case("all_to_all_single", uneven=True)]
    assert_right(world, claimed_cases([*cases, *every_collective(group=(1, 0), root=1)]))

    def body(rank: Rank) -> None:
        assert dist.get_debug_level() == dist.DebugLevel.DETAIL
        me, other = rank.index, 1 - rank.index
        for group in (None, dist.new_group([0, 1])):
            for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
                for right, out, label in _coalesced(rank, name, group):
                    assert_same(right, out, label)
            of: Any = group or dist.group.WORLD
            own = torch.tensor([10.0**me], device=rank.device)
            assert functional.wait_tensor(functional.all_reduce(own, "sum", of)).item() == 11
            assert functional.wait_tensor(functional.all_gather_tensor(own, 0, of)).tolist() == [1, 10]
            both = own.repeat(2)
            assert functional.wait_tensor(functional.reduce_scatter_tensor(both, "sum", 0, of)).item() == 11
            outs = [torch.zeros(1, device=rank.device), torch.zeros(2, device=rank.device)]
            of.reduce_scatter_tensor_coalesced(outs, [both, own.repeat(4)]).wait()
            assert [out.tolist() for out in outs] == [[11], [11, 11]]
            of.allgather_into_tensor_coalesced([both], [own]).wait()
            assert both.tolist() == [1, 10]
            tensors = [own.clone(), own.repeat(3)]
            dist.all_reduce_coalesced(tensors, group=group)
            assert [tensor.tolist() for tensor in tensors] == [[11], [11, 11, 11]]
            gathered = [[torch.zeros_like(own), torch.zeros(2, device=rank.device)] for _ in range(2)]
            dist.all_gather_coalesced(gathered, [own, own.repeat(2)], group)
            assert [[t.tolist() for t in line] for line in gathered] == [[[1], [1, 1]], [[10], [10, 10]]]
            sparse = torch.sparse_coo_tensor([[me]], [1.0], (3,)).to(rank.device)
            dist.all_reduce(sparse, group=group)
            assert sparse.to_dense().tolist() == [1, 1, 0]
            objects: list[Any] = [None, None]
            dist.all_gather_object(objects, "x" * (me + 1), group)
            assert objects == ["x", "xx"]
            dist.broadcast_object_list(objects[:1], 1, group)
            dist.scatter_object_list(objects, ["a", "bb"] if me else None, 1, group)
            assert objects[0] == ["a", "bb"][me]
            dist.gather_object(me, objects if me else None, 1, group)
            assert me == 0 or objects == [0, 1]
            for source in (0, None):
                if me == 0:
                    dist.send(own, 1, group, 3)
                else:
                    into = torch.zeros_like(own)
                    assert dist.recv(into, source, group, 3) == 0
                    assert into.item() == 1
            into = torch.zeros_like(own)
            ops = [dist.P2POp(dist.isend, own, other, group), dist.P2POp(dist.irecv, into, other, group)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert into.item() == 10**other
            dist.monitored_barrier(group)
            dist.barrier(group, async_op=True).wait()

    def _coalesced(rank: Rank, name: str, group: Any) -> Any:
        with coalescing_manager(group, async_ops=True) as manager:
            issued = calls(name, "SUM", torch.float32, group, rank.index, 2, rank)
        manager.wait()
        return issued

    world.run(body)
