"""JUnit XML: what a CI server gets to know of ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sessions import Folder, Session

pytestmark = pytest.mark.slow

TESTS = """
    import os
    import signal

    import torch.distributed as dist

    def test_passes(world):
        world.run(lambda rank: print("fine on", rank.index))

    def test_fails(world):
        def body(rank):
            print("<here>", rank.index)
            if rank.index == 1:
                raise ValueError("no & never")
            dist.barrier()
        world.run(body)

    def test_hangs(world):
        def body(rank):
            if rank.index == 0:
                dist.barrier()
        world.run(body)

    def test_crashes(world):
        def body(rank):
            if rank.index == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
        world.run(body)
"""


@pytest.fixture(scope="module")
def session(make_folder: Callable[[dict[str, str]], Folder]) -> Session:
    return make_folder({"test_it.py": TESTS}).run("--junitxml=junit.xml", "-o", "junit_logging=all")


def properties(session: Session, test: str) -> dict[str | None, str | None]:
    return {p.get("name"): p.get("value") for p in session.junit(test).iter("property")}


def test_passed(session: Session) -> None:
    """A passed test has its world as a property, and what its ranks printed, by rank."""
    case = session.junit("test_passes[2ranks]")
    assert case.find("failure") is None
    assert properties(session, "test_passes[2ranks]") == {"concord.world": "2 ranks (gloo on cpu)"}
    assert "[rank 1] fine on 1" in (case.findtext("system-out") or "")


@pytest.mark.parametrize(
    ("test", "verdict", "first", "headline"),
    [
        ("test_fails[2ranks]", "failed", "1", "rank 1 of 2 failed first: ValueError: no & never"),
        ("test_hangs[2ranks]", "hung", "1", "deadlock: rank 0 waits in barrier()"),
        ("test_crashes[2ranks]", "crashed", "1", "rank 1 of 2 failed first: killed by SIGKILL"),
    ],
)
def test_properties_of_a_failure(session: Session, test: str, verdict: str, first: str, headline: str) -> None:
    """Verdict, the rank to look at first and the headline are properties, each once."""
    names = [p.get("name") for p in session.junit(test).iter("property")]
    assert sorted(names) == ["concord.first_rank", "concord.headline", "concord.verdict", "concord.world"]  # type: ignore[type-var]
    found = properties(session, test)
    assert (found["concord.verdict"], found["concord.first_rank"]) == (verdict, first)
    assert (found["concord.headline"] or "").startswith(headline)


def test_failure_s_message_and_text(session: Session) -> None:
    """The failure's message is the headline; its text has the traceback of the rank and the last collectives."""
    failure = session.junit("test_fails[2ranks]").find("failure")
    assert failure is not None
    assert (failure.get("message") or "").startswith("rank 1 of 2 failed first: ValueError: no & never")
    text = failure.text or ""
    assert "rank 1: FIRST TO FAIL: ValueError: no & never" in text
    assert 'raise ValueError("no & never")' in text
    assert "last collectives" in text


def test_output_of_ranks(session: Session) -> None:
    """What each rank of a failed test printed is in system-out."""
    out = session.junit("test_fails[2ranks]").findtext("system-out") or ""
    assert out.count("[rank 0] <here> 0") == 1
    assert out.count("[rank 1] <here> 1") == 1
