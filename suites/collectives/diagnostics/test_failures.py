"""torch.distributed.elastic.multiprocessing.errors: what a launcher tells of workers that failed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler, ProcessFailure

from harness import Rank, World, requirement

KEPT = {"whole": 1.0, "half": 0.5, "nothing": 0.0, "no file": None}
"""The part of its error file that a worker has written when it is killed, or the disk is full."""
CODE = 73


@requirement(
    "COLL-FAILURE-8102",
    "A launcher tells which worker failed with what exit code, however much of its error file the worker could write.",
    source="torch.distributed.elastic.multiprocessing.errors: ProcessFailure, ChildFailedError, record; pytorch#56739: "
    "'Make ProcessFailure initialization error non-fatal'",
)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.world(1)
def test_error_files(world: World, kept: str) -> None:
    """Record an error as workers do, cut its file, and make the launcher's error; a whole file has the message."""

    def body(_: Rank) -> None:
        part = KEPT[kept]
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            path = Path(folder, "error.json")
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
            if part is not None:
                try:
                    raise ValueError("the worker's own words")
                except ValueError as error:
                    ErrorHandler().record_exception(error)
                os.truncate(path, int(path.stat().st_size * part))
            failure = ProcessFailure(local_rank=3, pid=12345, exitcode=CODE, error_file=str(path))
            told = str(ChildFailedError("program", {5: failure}))
        assert all(text in told for text in ("rank      : 5 (local_rank: 3)", f"exitcode  : {CODE} (pid: 12345)")), told
        assert ("the worker's own words" in told) == (part == 1), told

    world.run(body)
