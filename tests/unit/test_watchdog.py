"""When a deadlock is proven, when it must not be, and who is named for it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.worlds import watchdog
from harness.worlds.places import TORCH, WORLDS
from harness.worlds.views import Record, View, view_of
from harness.worlds.watchdog import (
    SETTLE_IN_OPERATOR,
    SETTLE_ON_DEVICE,
    blocked,
    closed,
    deadlocked,
    explain,
    in_collective,
    progress,
    settling,
    standing,
    suspect,
)

RUN_TIMEOUT = 60.0
TEST = ("/repo/tests/test_x.py", 12, "body")
LOOP = (f"{WORLDS}rank.py", 200, "run")
DIST = (f"{TORCH}distributed/distributed_c10d.py", 3000, "all_reduce")
DDP = (f"{TORCH}nn/parallel/distributed.py", 1600, "forward")
ENGINE = (f"{TORCH}autograd/graph.py", 820, "_engine_run_backward")
RECORDER = (f"{WORLDS}recorder.py", 92, "method")
OPS = (f"{TORCH}_ops.py", 1200, "__call__")
LIBRARY = (f"{TORCH}_library/autograd.py", 41, "forward_no_grad")
GRAPH = ("<eval_with_key>.1", 7, "forward")
INDUCTOR = (f"/tmp/torchinductor_me/ab/c{'a2' * 25}b.py", 80, "call")


def record(seq: int = 1, op: str = "all_reduce", size: Sequence[int] = (4,), **other: Any) -> Record:
    return Record(**{"group": "0", "seq": seq, "op": op, "sizes": (tuple(size),), "dtypes": ("Float",), **other})


def view(
    index: int, *records: Record, frames: Sequence[tuple[str, int, str]] = (LOOP, TEST, DIST), **other: Any
) -> View:
    """A rank that waits in a collective."""
    return View(
        **{"index": index, "state": "running", "quiet": True, "frames": tuple(frames), "records": records, **other}
    )


def ended(index: int, how: str, *records: Record) -> View:
    return View(index, how, answered=False, records=records or None)


def done(r: Record) -> Record:
    return dataclasses.replace(r, done=True)


class TestProven:
    def test_all_wait_for_one_another(self) -> None:
        """Ranks that all wait in collectives are deadlocked."""
        assert deadlocked([view(0, record()), view(1, record(size=(5,)))], RUN_TIMEOUT)

    @pytest.mark.parametrize("how", ["returned", "raised", "skipped", "died"])
    def test_one_has_ended(self, how: str) -> None:
        """A rank that waits for one that has ended will never go on."""
        assert deadlocked([view(0, record()), ended(1, how)], RUN_TIMEOUT)

    def test_alone(self) -> None:
        """A single rank that waits for itself is deadlocked."""
        assert deadlocked([view(0, record(op="recv", p2p=True))], RUN_TIMEOUT)

    def test_one_is_stopped(self) -> None:
        """A stopped rank does not come back by itself; nothing else need be known of it."""
        stopped = View(1, "running", answered=False, stopped=True)
        assert deadlocked([view(0, record()), stopped], RUN_TIMEOUT)

    @pytest.mark.parametrize(
        ("frames", "called"),
        [
            ((TEST, DIST), ""),
            ((TEST, DDP), ""),
            ((TEST, ENGINE), ""),
            ((TEST, DIST, RECORDER), ""),
            ((TEST, DIST, OPS), ""),
            ((TEST,), "work.wait()"),
            ((TEST,), "works[0].wait( )"),
            ((TEST,), "torch.ops._c10d_functional.wait_tensor(x)"),
            ((TEST, OPS), "torch.ops._c10d_functional.wait_tensor.default(x)"),
            ((TEST,), "group.barrier(options)"),
            ((TEST,), "tensor.tolist()"),
            ((TEST,), "torch._C._cuda_synchronize()"),
            ((TEST,), "torch._C._accelerator_synchronizeDevice(index)"),
        ],
    )
    def test_places_to_wait_in(self, frames: Sequence[tuple[str, int, str]], called: str) -> None:
        """A rank waits in torch.distributed, in a backward pass with a collective under way, and in a wait."""
        assert blocked(view(0, record(), frames=frames, called=called), RUN_TIMEOUT)

    @pytest.mark.parametrize(
        "operator",
        [
            "_c10d_functional.wait_tensor.default",
            "c10d.allreduce_.default",
            "_c10d_functional_autograd.all_to_all_single",
        ],
    )
    @pytest.mark.parametrize("frames", [(TEST, GRAPH, OPS), (TEST, INDUCTOR, OPS, LIBRARY, OPS)])
    def test_operators_to_wait_in(self, frames: Sequence[tuple[str, int, str]], operator: str) -> None:
        """A rank waits in an operator of torch.distributed, whichever code calls it."""
        assert blocked(view(0, record(), frames=frames, operator=operator), RUN_TIMEOUT)
        assert standing(view(0, record(), frames=frames, operator=operator)).endswith(f"{TEST[0]}:{TEST[1]}")
        assert standing(view(0, frames=frames, operator=operator)) == f"in {operator} at {TEST[0]}:{TEST[1]}"

    def test_without_flight_recorder(self) -> None:
        """Inside torch.distributed a rank waits, whether or not the backend keeps a record."""
        assert blocked(view(0, records=None), RUN_TIMEOUT)

    def test_timeout_as_long_as_the_run(self) -> None:
        """A wait that ends no earlier than the run does not help."""
        waits = view(0, record(timeout=RUN_TIMEOUT), timeout=RUN_TIMEOUT)
        assert blocked(waits, RUN_TIMEOUT)

    def test_short_timeout_of_a_finished_collective(self) -> None:
        """The time limit of a collective that is done says nothing."""
        assert blocked(view(0, done(record(timeout=1.0)), record(2)), RUN_TIMEOUT)


class TestNotProven:
    @pytest.mark.parametrize(
        "other",
        [
            pytest.param({"quiet": False}, id="computes"),
            pytest.param({"frames": (LOOP, TEST), "called": "time.sleep(5)"}, id="sleeps"),
            pytest.param({"frames": (LOOP, TEST), "called": "lock.acquire()"}, id="waits for a lock"),
            pytest.param({"frames": (LOOP, TEST), "called": "process.await_it()"}, id="something like wait"),
            pytest.param(
                {"frames": (LOOP, TEST), "called": "work.wait(timedelta(seconds=5))"}, id="own limit in the call"
            ),
            pytest.param({"frames": (LOOP, TEST), "called": "work.wait("}, id="call on several lines"),
            pytest.param({"frames": (LOOP, TEST, ("/lib/threading.py", 327, "wait"))}, id="threading"),
            pytest.param({"frames": ()}, id="no frames"),
            pytest.param({"frames": (OPS,)}, id="only frames that say nothing"),
            pytest.param(
                {"frames": (TEST, GRAPH, OPS), "operator": "aten.sum.default"}, id="an operator that computes"
            ),
            pytest.param({"frames": (TEST, OPS), "operator": "my.c10d.wait"}, id="an operator of another library"),
            pytest.param({"alarm": "Timer-1"}, id="timer thread"),
            pytest.param({"timeout": 5.0}, id="own limit in torch.distributed"),
            pytest.param({"records": (record(timeout=5.0),)}, id="own limit of the group"),
            pytest.param({"answered": False}, id="no answer"),
            pytest.param(
                {"frames": (LOOP, TEST), "called": "work.wait()", "records": None}, id="wait, no Flight Recorder"
            ),
            pytest.param({"frames": (LOOP, TEST), "called": "work.wait()", "records": ()}, id="wait, nothing recorded"),
            pytest.param(
                {"frames": (LOOP, TEST), "called": "x.wait()", "records": (done(record()),)}, id="wait, all done"
            ),
            pytest.param({"frames": (LOOP, TEST, ENGINE), "records": (done(record()),)}, id="backward, all done"),
            pytest.param({"frames": (LOOP, TEST, ENGINE), "records": None}, id="backward, no Flight Recorder"),
        ],
    )
    def test_one_may_move(self, other: dict[str, Any]) -> None:
        """As long as one rank may still do something by itself, nothing is proven."""
        slow = dataclasses.replace(view(1, record()), **other)
        assert not deadlocked([view(0, record(size=(5,))), slow, ended(2, "died")], RUN_TIMEOUT)

    @pytest.mark.parametrize("how", ["returned", "raised", "skipped", "died"])
    def test_all_ended(self, how: str) -> None:
        """A world whose ranks have all ended is not deadlocked."""
        assert not deadlocked([ended(0, how), ended(1, how)], RUN_TIMEOUT)

    def test_no_ranks(self) -> None:
        """Nothing is not deadlocked."""
        assert not deadlocked([], RUN_TIMEOUT)


GROUPS = (("0", (0, 1)), ("side", (0, 1)))


def on_device(index: int, *records: Record, **other: Any) -> View:
    """A rank of two that waits for its device, with records from the beginning of the run."""
    return view(index, *records, **{"groups": GROUPS, "complete": True, **other})


SIDE = record(group="side")


class TestClosed:
    """What records alone prove where ranks wait for devices."""

    def test_circle(self) -> None:
        """Ranks that have each issued what the other has not are deadlocked."""
        assert closed([on_device(0, record()), on_device(1, SIDE)], RUN_TIMEOUT)

    def test_circle_of_three(self) -> None:
        """Each rank waits for the next one, on a group of the two."""
        groups = tuple((f"{i}", (i, (i + 1) % 3)) for i in range(3))
        views = [
            view(i, record(group=str(i)), complete=True, groups=[g for g in groups if i in g[1]]) for i in range(3)
        ]
        assert closed(views, RUN_TIMEOUT)

    def test_later_in_the_run(self) -> None:
        """What has completed before does not matter, nor does a group that both have used."""
        before = [done(record()), done(SIDE)]
        late = on_device(0, *before, record(2)), on_device(1, *before, record(2, group="side"))
        assert closed(late, RUN_TIMEOUT)

    def test_all_outstanding_lack_somebody(self) -> None:
        """A rank may have several outstanding collectives, if none of them can complete."""
        assert closed([on_device(0, record(), record(2)), on_device(1, SIDE, record(2, group="side"))], RUN_TIMEOUT)

    def test_member_that_has_ended(self) -> None:
        """A rank that has returned issues nothing any more."""
        returned = on_device(1, done(SIDE), state="returned")
        assert closed([on_device(0, done(SIDE), record()), returned], RUN_TIMEOUT)

    @pytest.mark.parametrize(
        "other",
        [
            pytest.param({"frames": (LOOP, TEST), "called": "time.sleep(5)"}, id="may still issue it"),
            pytest.param({"alarm": "Timer-1"}, id="a thread of it may"),
            pytest.param({"records": (SIDE, record())}, id="has issued what the other waits for"),
            pytest.param({"records": (SIDE, record(2))}, id="is further on"),
            pytest.param({"records": (SIDE, record(op="send", p2p=True))}, id="a message outstanding"),
            pytest.param({"records": (record(op="send", p2p=True),)}, id="only a message"),
            pytest.param({"records": (done(SIDE),)}, id="nothing outstanding"),
            pytest.param({"records": ()}, id="nothing recorded"),
            pytest.param({"records": None}, id="no records"),
            pytest.param({"complete": False}, id="records dropped"),
            pytest.param({"groups": GROUPS[:1]}, id="unknown group"),
            pytest.param({"groups": (GROUPS[0], ("side", (1, 7)))}, id="unknown member"),
            pytest.param({"answered": False, "stopped": True, "records": None}, id="stopped"),
            pytest.param({"state": "died", "records": None}, id="died with its records"),
        ],
    )
    def test_not_proven(self, other: dict[str, Any]) -> None:
        """As long as one collective may complete, or as little is known, nothing is proven, whichever rank it is."""
        proven = [on_device(0, record()), on_device(1, SIDE)]
        found = dataclasses.replace(proven[1], **other)
        assert closed(proven, RUN_TIMEOUT)
        assert not closed([proven[0], found], RUN_TIMEOUT)

    def test_records_of_an_ended_member_were_dropped(self) -> None:
        """A rank that has ended may have issued what its recorder dropped."""
        returned = on_device(1, done(SIDE), state="returned", complete=False)
        assert not closed([on_device(0, done(SIDE), record()), returned], RUN_TIMEOUT)

    def test_records_of_a_bystander_were_dropped(self) -> None:
        """A rank for which no other one waits may have something outstanding that can complete."""
        waits = view(2, record(group="late"), groups=(("late", (0, 2)),), complete=True)
        circle = [on_device(0, record()), on_device(1, SIDE)]
        assert closed([*circle, waits], RUN_TIMEOUT)
        assert not closed([*circle, dataclasses.replace(waits, complete=False)], RUN_TIMEOUT)

    def test_circle_on_groups_that_connect(self) -> None:
        """A collective that is still being issued waits like one that a recorder has."""
        first = [on_device(0, done(record()), issuing=SIDE), on_device(1, done(record()), issuing=record(2))]
        assert closed(first, RUN_TIMEOUT)
        assert "rank 0 waits in all_reduce(float32[4]), collective 1 of group 'side' [0, 1]" in explain(first).headline

    @pytest.mark.parametrize(
        "other",
        [
            pytest.param({"issuing": SIDE}, id="the same"),
            pytest.param({"issuing": record(7, group="side")}, id="of the same group"),
            pytest.param({"issuing": record(2, op="send", p2p=True)}, id="a message"),
            pytest.param({"records": ()}, id="nothing recorded"),
        ],
    )
    def test_issuing_proves_nothing(self, other: dict[str, Any]) -> None:
        """Ranks that connect the same group may get on, and a recorder without records may be off."""
        waits = on_device(0, done(record()), issuing=SIDE)
        found = dataclasses.replace(on_device(1, done(record()), issuing=record(2)), **other)
        assert not closed([waits, found], RUN_TIMEOUT)

    def test_operator_that_waits(self) -> None:
        """An operator may wait until the device has finished what can't end; on the host, it computes."""
        returned = on_device(1, done(record()), state="returned")
        compiled = {"frames": (LOOP, TEST), "called": "mul(x, 2)", "operator": "aten.mul.Tensor"}
        waits = on_device(0, done(record()), record(2), on_device=True, **compiled)
        assert closed([waits, returned], RUN_TIMEOUT)
        assert settling([waits, returned]) == SETTLE_IN_OPERATOR
        assert not closed([dataclasses.replace(waits, on_device=False), returned], RUN_TIMEOUT)
        assert not closed([dataclasses.replace(waits, operator=""), returned], RUN_TIMEOUT)
        assert not closed([dataclasses.replace(waits, records=(done(record()),)), returned], RUN_TIMEOUT)
        within = dataclasses.replace(waits, operator="_c10d_functional.wait_tensor.default")
        assert settling([within, returned]) == SETTLE_ON_DEVICE

    def test_recorders_have_their_own_words(self) -> None:
        """One that is being issued is never said to differ from what a recorder has."""
        views = [on_device(0, record(op="_allgather_base")), on_device(1, issuing=record(op="all_gather_into_tensor"))]
        assert "differs" not in explain(views).headline

    def test_same_collective(self) -> None:
        """What both have issued may complete at any time."""
        assert not closed([on_device(0, record()), on_device(1, record())], RUN_TIMEOUT)

    def test_all_ended(self) -> None:
        """A world whose ranks have all ended is not deadlocked."""
        assert not closed([ended(0, "returned"), ended(1, "returned")], RUN_TIMEOUT)


class TestProgress:
    @pytest.mark.parametrize(
        "later",
        [
            {"frames": (LOOP, ("/repo/tests/test_x.py", 13, "body"), DIST)},
            {"records": (done(record()), record(2))},
            {"records": (done(record()),)},
            {"stopped": True},
            {"state": "returned"},
        ],
        ids=["line", "next collective", "done", "stopped", "ended"],
    )
    def test_moved(self, later: dict[str, Any]) -> None:
        """A rank that got anywhere looks different."""
        now = view(0, record())
        assert progress([now]) != progress([dataclasses.replace(now, **later)])

    def test_standing_still(self) -> None:
        """Ranks that did not move look the same."""
        assert progress([view(0, record()), view(1)]) == progress([view(0, record()), view(1)])


class TestExplain:
    @pytest.mark.parametrize(
        ("odd", "words"),
        [
            (record(op="all_gather"), "rank 2 has all_gather(float32[4])"),
            (record(size=(5,)), "rank 2 has all_reduce(float32[5])"),
            (record(dtypes=("Double",)), "rank 2 has all_reduce(float64[4])"),
            (record(size=()), "rank 2 has all_reduce(float32[])"),
            (record(op="barrier", sizes=(), dtypes=()), "rank 2 has barrier()"),
        ],
        ids=["op", "shape", "dtype", "0-dim", "no tensor"],
    )
    def test_mismatch(self, odd: Record, words: str) -> None:
        """The one that differs from the majority is named, with what each side issued."""
        found = explain([view(0, record()), view(1, record()), view(2, odd)])
        expected = f"collective 1 of the default group differs: ranks 0, 1 have all_reduce(float32[4]), {words}"
        assert (found.headline, found.culprits) == (expected, (2,))

    def test_no_majority(self) -> None:
        """One against one, nobody is blamed."""
        found = explain([view(0, record()), view(1, record(op="barrier"))])
        assert ("differs" in found.headline, found.culprits) == (True, ())

    def test_largest_group_is_no_majority_in_a_tie(self) -> None:
        """Two against two, nobody is blamed."""
        a, b = record(), record(op="barrier")
        assert explain([view(0, a), view(1, a), view(2, b), view(3, b)]).culprits == ()

    def test_three_ways(self) -> None:
        """Everyone outside the largest side is named."""
        views = [view(0, record(op="a")), view(1, record()), view(2, record()), view(3, record(op="b"))]
        assert explain(views).culprits == (0, 3)

    def test_order(self) -> None:
        """Two collectives in another order on one rank: the first that differs is named."""
        a, b = record(1, "all_reduce"), record(1, "broadcast")
        found = explain([view(0, a), view(1, a), view(2, b)])
        assert ("collective 1 of" in found.headline, found.culprits) == (True, (2,))

    def test_groups_in_another_order(self) -> None:
        """Ranks that use two groups in another order are both said to wait, each in its group."""
        groups = (("0", (0, 1)), ("side", (0, 1)))
        ranks = [
            view(0, record(), groups=groups),
            view(1, record(group="side"), groups=groups),
        ]
        found = explain(ranks).headline
        assert ("rank 0 waits in all_reduce" in found, "rank 1, which waits in all_reduce" in found) == (True, True)

    def test_shape_need_not_agree_everywhere(self) -> None:
        """A scatter has tensors on its source only: other shapes are no mismatch there."""
        found = explain([view(0, record(op="scatter")), view(1, record(op="scatter", sizes=(), dtypes=()))])
        assert "differs" not in found.headline

    @pytest.mark.parametrize("how", ["returned", "raised", "skipped", "died"])
    def test_missing_rank_has_ended(self, how: str) -> None:
        """The rank that others wait for is named, with how it ended."""
        groups = (("0", (0, 1, 2)),)
        found = explain([view(0, record(), groups=groups), view(1, record(), groups=groups), ended(2, how)])
        expected = (
            "ranks 0, 1 wait in all_reduce(float32[4]), collective 1 of the default group at /repo/tests/test_x.py:12, "
            f"for rank 2, which has {how}"
        )
        assert (found.headline, found.culprits) == (expected, (2,))

    def test_missing_rank_is_stopped(self) -> None:
        """A rank that others wait for and that was stopped is said to be."""
        stopped = View(1, "running", answered=False, stopped=True)
        found = explain([view(0, record(), groups=(("0", (0, 1)),)), stopped])
        assert ("for rank 1, which has been stopped by a signal" in found.headline, found.culprits) == (True, (1,))

    def test_only_a_stopped_rank(self) -> None:
        """Where no record helps, a stopped rank explains the rest."""
        found = explain([view(0), View(1, "running", answered=False, stopped=True)])
        assert (found.headline, found.culprits) == ("rank 1 stopped by a signal, the others wait", (1,))

    def test_mismatch_comes_before_absence(self) -> None:
        """A collective that differs says more than one that is missing."""
        views = [
            view(0, record(group="early"), record(group="late", op="a"), groups=(("early", (0, 1)),)),
            view(1, record(group="late", op="b"), groups=(("late", (0, 1)),)),
        ]
        assert "'late' [0, 1] differs" in explain(views).headline

    def test_finished_difference_is_none(self) -> None:
        """What has completed is past, and not what ranks wait in."""
        past = [done(record(1, "all_gather", size=(2,))), done(record(1, "all_gather", size=(3,)))]
        found = explain([view(0, past[0], record(2)), view(1, past[1], record(2, "barrier"))])
        assert "collective 2" in found.headline

    def test_group_of_some_ranks(self) -> None:
        """A rank that is no member of a group is not missed in it."""
        groups = (("pair", (1, 2)),)
        views = [
            ended(0, "returned"),
            view(1, record(group="pair"), groups=groups),
            ended(2, "returned"),
        ]
        found = explain(views)
        assert ("group 'pair' [1, 2]" in found.headline, found.culprits) == (True, (2,))

    def test_group_in_another_order_of_ranks(self) -> None:
        """Members are global ranks, in whatever order the group has them."""
        groups = (("pair", (2, 0)),)
        found = explain([view(0, record(group="pair"), groups=groups), view(1), view(2, groups=groups)])
        assert found.culprits == (2,)

    def test_member_that_is_not_in_the_world(self) -> None:
        """A group that names a rank we do not have is no reason to stumble."""
        found = explain([view(0, record(group="x"), groups=(("x", (0, 7)),)), ended(1, "died")])
        assert "rank 0 waits" in found.headline

    def test_point_to_point(self) -> None:
        """Two ranks that both receive are said to, and nobody is blamed."""
        views = [view(i, record(op="recv", p2p=True)) for i in range(2)]
        found = explain(views)
        place = "in recv(float32[4]) at /repo/tests/test_x.py:12"
        assert (found.headline, found.culprits) == (f"rank 0 waits {place}; rank 1 waits {place}", ())

    def test_point_to_point_with_one_that_ended(self) -> None:
        """A rank that receives from one that has returned: that one is named."""
        found = explain([view(0, record(op="recv", p2p=True)), ended(1, "returned")])
        assert ("rank 1 has returned" in found.headline, found.culprits) == (True, (1,))

    def test_without_records(self) -> None:
        """Without records, what is left to say is where each rank stands."""
        found = explain([view(0, records=None), view(1, records=None)])
        assert found.headline.startswith("rank 0 waits in all_reduce at /repo/tests/test_x.py:12; rank 1 waits")

    def test_several_tensors(self) -> None:
        """A collective of several tensors shows the first, and how many."""
        assert str(record(sizes=((4,), (2, 2)))) == "all_reduce(float32[4] x2)"

    def test_unknown_dtype(self) -> None:
        """A dtype that we have no name for is shown in the recorder's."""
        assert str(record(dtypes=("Float8_e4m3fn",))) == "all_reduce(float8_e4m3fn[4])"


class TestSuspect:
    """Who is named where the time is over and nothing is proven."""

    def test_rank_that_has_not_come_to_the_collective(self) -> None:
        """The rank that others wait for is suspected, with what it does instead."""
        groups = (("0", (0, 1, 2)),)
        views = [view(i, record(), groups=groups) for i in (0, 2)]
        found = suspect([*views, view(1, frames=(LOOP, TEST), groups=groups)])
        assert found is not None
        assert found.headline.endswith("for rank 1, which is in body at /repo/tests/test_x.py:12")
        assert found.culprits == (1,)

    def test_without_records(self) -> None:
        """Where no record helps, those that do not wait are suspected by those that do."""
        found = suspect([view(0, records=None), view(1, frames=(LOOP, TEST), records=None)])
        place = "at /repo/tests/test_x.py:12"
        assert found is not None
        assert (found.headline, found.culprits) == (
            f"rank 0 waits in all_reduce {place}; rank 1 is in body {place}",
            (1,),
        )

    def test_one_that_has_ended(self) -> None:
        """Of those that do not wait, one that has ended is suspected only where the others do wait."""
        waits, works = view(0, records=None), view(2, frames=(LOOP, TEST), records=None)
        found = suspect([waits, ended(1, "returned"), works]), suspect([waits, ended(1, "returned")])
        assert [f.culprits for f in found if f is not None] == [(2,), (1,)]

    @pytest.mark.parametrize("frames", [(LOOP, TEST), (LOOP, TEST, DIST)], ids=["nobody waits", "all wait"])
    def test_nobody(self, frames: tuple[tuple[str, int, str], ...]) -> None:
        """Where all ranks work, or all wait, none is suspected."""
        assert suspect([view(i, frames=frames, records=None) for i in range(3)]) is None


class TestWhere:
    def test_user_frame(self) -> None:
        """A rank stands where the user's code called into torch, not in torch nor in our loop."""
        assert watchdog.user_frame((LOOP, TEST, DIST, RECORDER)) == TEST

    def test_backend_in_python(self) -> None:
        """Below a call that issues a collective is the code of a backend, and no user's."""
        frames = (LOOP, TEST, DIST, RECORDER, ("/lib/vendor/collectives.py", 23, "connect"))
        assert watchdog.user_frame(frames) == TEST
        assert in_collective(view(0, frames=frames, issuing=record()))
        assert not in_collective(view(0, frames=frames))

    def test_project_in_a_folder_called_torch(self) -> None:
        """A user's project may lie below a folder called torch, or torch/distributed: it is the user's all the same."""
        mine = ("/projects/torch/distributed/test_x.py", 3, "body")
        assert watchdog.user_frame((LOOP, mine, DIST)) == mine
        assert not in_collective(view(0, record(), frames=(LOOP, mine), called="select([], [], [])"))

    def test_no_user_frame(self) -> None:
        """A rank without a frame of the user's stands nowhere."""
        assert watchdog.location(view(0, frames=(LOOP, DIST))) == ""

    def test_in_collective_needs_a_frame(self) -> None:
        """A rank without frames is not in a collective."""
        assert not in_collective(view(0, record(), frames=()))


def snapshot(**changes: Any) -> dict[str, Any]:
    main = {"name": "MainThread", "native": 10, "main": True, "called": "x()", "timeout": 2, "frames": [list(TEST)]}
    raw = {
        "group": "0",
        "seq": 1,
        "p2p": False,
        "op": "all_reduce",
        "sizes": [[4]],
        "dtypes": ["Float"],
        "done": False,
        "timeout_s": 60.0,
        "time_ns": 5,
    }
    return {"threads": [main], "records": [raw], "groups": {"0": [0, 1]}, **changes}


def seen(found: Any, alarm_of: dict[int, bool] | None = None) -> View:
    return view_of(3, found, quiet=True, stopped=False, alarm_of=alarm_of or {})


def thread(**changes: Any) -> dict[str, Any]:
    return {"name": "T", "native": 11, "main": False, "called": "", "timeout": None, "frames": [], **changes}


class TestViewOf:
    def test_snapshot(self) -> None:
        """A monitor's answer becomes a view."""
        expected = View(
            index=3,
            state="running",
            quiet=True,
            frames=(TEST,),
            called="x()",
            timeout=2.0,
            records=(record(timeout=60.0, time_ns=5),),
            groups=(("0", (0, 1)),),
        )
        assert expected == seen(snapshot())

    @pytest.mark.parametrize(("said", "known"), [(True, True), (False, False), (1, False), ("yes", False)])
    def test_complete(self, said: object, known: bool) -> None:
        """Records are complete only if the monitor says so, in so many words."""
        assert seen(snapshot(complete=said)).complete is known

    @pytest.mark.parametrize(
        ("issued_ns", "expected"), [(5 + 2_000_000, record(2, dtypes=("float32",))), (5, None), (400_000, None)]
    )
    def test_issuing(self, issued_ns: int, expected: Record | None) -> None:
        """A collective that is being issued gets its number, unless a recorder may have it already."""
        raw = {"group": "0", "op": "all_reduce", "sizes": [[4]], "dtypes": ["float32"], "p2p": False}
        found = snapshot()
        found["threads"][0]["issuing"] = {**raw, "time_ns": issued_ns}
        if expected is not None:
            expected = dataclasses.replace(expected, time_ns=issued_ns)
        assert seen(found).issuing == expected

    def test_what_a_monitor_says(self) -> None:
        """What the monitor of this very process says can be read."""
        from harness.worlds import monitor

        found = seen(json.loads(json.dumps(monitor.snapshot())))
        assert (found.answered, found.frames[-1][2]) == (True, "snapshot")

    @pytest.mark.parametrize(("alarms", "expected"), [({11: False}, ""), ({11: True}, "T"), ({}, "T")], ids=str)
    def test_other_threads(self, alarms: dict[int, bool], expected: str) -> None:
        """A thread that may wake by itself is an alarm, and so is one of which nothing is known."""
        found = snapshot()
        found["threads"].append(thread())
        assert seen(found, alarms).alarm == expected

    def test_thread_without_a_name(self) -> None:
        """A thread whose name is empty can be an alarm like any other."""
        found = snapshot()
        found["threads"].append(thread(name=""))
        assert seen(found).alarm != ""

    def test_no_flight_recorder(self) -> None:
        """Without a recorder, records are unknown and not empty."""
        assert seen(snapshot(records=None)).records is None

    @pytest.mark.parametrize(
        "garbage",
        [
            None,
            {},
            [],
            "threads",
            7,
            {"error": "MemoryError()"},
            {"threads": 3},
            {"threads": "abc"},
            {"threads": [{}]},
            {"threads": [None]},
            snapshot(threads=[thread(frames=[["f", 1]])]),
            snapshot(threads=[thread(frames=[["f", "one", "g"]])]),
            snapshot(threads=[thread(frames=7)]),
            snapshot(threads=[thread(native=[])]),
            snapshot(threads=[thread(main=True, timeout="soon")]),
            snapshot(threads=[thread(main=True, issuing=7)]),
            snapshot(threads=[thread(main=True, issuing={"group": "0"})]),
            snapshot(records=7),
            snapshot(records=[{}]),
            snapshot(records=[None]),
            snapshot(records=[{**snapshot()["records"][0], "seq": "x"}]),
            snapshot(records=[{**snapshot()["records"][0], "seq": float("inf")}]),
            snapshot(records=[{**snapshot()["records"][0], "sizes": [[None]]}]),
            snapshot(groups=[]) | {"groups": [1]},
            snapshot(groups={"0": None}),
            snapshot(groups={"0": ["a"]}),
        ],
        ids=lambda g: ascii(g)[:50],
    )
    def test_garbage(self, garbage: Any) -> None:
        """What no monitor says counts as no answer."""
        assert View(3, "running", answered=False, quiet=True) == seen(garbage)

    @settings(deadline=None, max_examples=300)
    @given(st.data())
    def test_any_snapshot(self, data: st.DataObject) -> None:
        """Whatever JSON a rank sends, it gives a view that every decision can be taken on."""
        anything = st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        )

        def damaged(value: Any) -> Any:
            """``value`` with one part of it, at any depth, replaced by anything."""
            if isinstance(value, dict) and value and data.draw(st.integers(0, 5)):
                key = data.draw(st.sampled_from(sorted(value)))
                return {**value, key: damaged(value[key])}
            if isinstance(value, list) and value and data.draw(st.integers(0, 5)):
                at = data.draw(st.integers(0, len(value) - 1))
                return [*value[:at], damaged(value[at]), *value[at + 1 :]]
            return data.draw(anything)

        whole = snapshot()
        raw = {"group": "side", "op": "all_reduce", "sizes": [[4]], "dtypes": [], "p2p": False, "time_ns": 9}
        whole["threads"][0]["issuing"] = raw
        whole["threads"].append(thread())
        views = [dataclasses.replace(seen(damaged(whole)), index=i) for i in range(2)]
        deadlocked(views, RUN_TIMEOUT)
        explain([*views, ended(2, "died")])
        assert progress(views) == progress(views)


def test_progress_when_the_recorder_is_full() -> None:
    """As many records as before, and as many of them done, are progress if they are newer ones."""
    before = [view(0, *(done(record(seq)) for seq in range(1, 5)), record(5))]
    after = [view(0, *(done(record(seq)) for seq in range(2, 6)), record(6))]
    assert progress(before) != progress(after)


def test_main_thread_that_sleeps() -> None:
    """A main thread that the kernel has in a sleep wakes up by itself, wherever its frames are."""
    thread = {"name": "MainThread", "native": 7, "main": True, "called": "", "timeout": None, "frames": [list(DIST)]}
    answer = {"threads": [thread], "records": []}
    asleep = view_of(0, answer, quiet=True, stopped=False, alarm_of={7: True})
    waiting = view_of(0, answer, quiet=True, stopped=False, alarm_of={7: False})
    assert not blocked(asleep, RUN_TIMEOUT)
    assert blocked(waiting, RUN_TIMEOUT)
