"""Tracebacks of exceptions that end a rank."""

from __future__ import annotations

import contextlib
import io
import sys
from types import TracebackType

import pytest
import torch.distributed as dist

from fixtures.beginnings import started
from harness import Rank, World, requirement


@requirement(
    "COLL-LIFE-69",
    "Every line of an uncaught exception's traceback begins with the rank in the default group, if it has any text.",
    source="torch.distributed.init_process_group; distributed_c10d.py: init_process_group: 'rank' of the excepthook",
)
@requirement(
    "COLL-LIFE-70",
    "The excepthook that a program had before init_process_group still gets every uncaught exception, once.",
    source="sys.excepthook; torch.distributed.init_process_group",
)
@pytest.mark.world(2)
def test_lines(world: World) -> None:
    """Ranks are the world's or swapped; local ranks, and what launchers call ranks, are the same, others or missing."""

    def body(rank: Rank) -> None:
        dist.barrier()
        dist.destroy_process_group()
        environments: list[dict[str, str]] = [
            {},
            {"LOCAL_RANK": "0", "RANK": "5"},
            {"LOCAL_RANK": "7", "GROUP_RANK": "3"},
        ]
        for number, environment in enumerate(environments):
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv("LOCAL_RANK", raising=False)
                for name, value in environment.items():
                    patch.setenv(name, value)
                seen: list[BaseException] = []

                def hook(kind: type[BaseException], error: BaseException, at: TracebackType | None) -> None:
                    seen.append(error)  # noqa: B023 - this turn's
                    sys.__excepthook__(kind, error, at)

                patch.setattr(sys, "excepthook", hook if number else sys.__excepthook__)
                me = rank.index if number % 2 else 1 - rank.index
                store = dist.PrefixStore(f"traceback {number}", rank.store)
                dist.init_process_group(rank.backend, store=store, rank=me, world_size=2)
                dist.new_group([1])  # in which rank 1 is the first
                text = io.StringIO()
                with contextlib.redirect_stderr(text):
                    assert sys.stderr is text
                    try:
                        try:
                            raise KeyError("before")
                        except KeyError as e:
                            raise ValueError("first\n\nthird") from e
                    except ValueError as e:
                        error = e
                        sys.excepthook(type(e), e, e.__traceback__)
                    assert sys.stderr is text
                lines = text.getvalue().split("\n")
                assert all(line.startswith(f"[rank{me}]: ") for line in lines if line), (environment, lines)
                bare = [line.removeprefix(f"[rank{me}]: ") for line in lines]
                assert "KeyError: 'before'" in bare
                assert bare[-4:] == ["ValueError: first", "", "third", ""]
                assert seen == ([error] if number else [])
                dist.barrier()
                dist.destroy_process_group()
        started(rank, "back", rank.index, 2)

    world.run(body)
