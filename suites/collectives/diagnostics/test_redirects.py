"""Standard streams of a rank that torch.distributed.elastic redirects to a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.redirects import redirect_stderr, redirect_stdout

from harness import Rank, World, requirement

STREAMS: dict[str, tuple[Callable[..., Any], int]] = {"out": (redirect_stdout, 1), "err": (redirect_stderr, 2)}


@requirement(
    "COLL-REDIRECT-3500",
    "A standard stream that is redirected to a file goes there until the end of the block, even if that raises.",
    source="torch/distributed/elastic/multiprocessing/redirects.py: redirect; torchrun: --redirects",
)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.world(2)
def test_redirected(world: World, tmp_path: Path, stream: str) -> None:
    """Redirect twice, one within the other; the inner or the outer block raises, or none."""

    def body(rank: Rank) -> None:
        redirect, number = STREAMS[stream]

        def target() -> tuple[int, int]:
            found = os.fstat(number)
            return found.st_dev, found.st_ino

        def identity(path: Path) -> tuple[int, int]:
            found = path.stat()
            return found.st_dev, found.st_ino

        before = target()
        for raises in ("neither", "inner", "outer"):
            outer, inner = (tmp_path / f"{name} of {rank.index}, {raises}" for name in ("outer", "inner"))
            try:
                with redirect(str(outer)):
                    assert target() == identity(outer), raises
                    try:
                        with redirect(str(inner)):
                            os.write(number, b"inner")
                            assert target() == identity(inner), raises
                            if raises == "inner":
                                raise KeyError(raises)
                    except KeyError:
                        pass
                    assert target() == identity(outer), raises
                    os.write(number, b"outer")
                    if raises == "outer":
                        raise KeyError(raises)
            except KeyError:
                pass
            assert target() == before, raises
            assert (inner.read_bytes(), outer.read_bytes()) == (b"inner", b"outer"), raises

    world.run(body)
