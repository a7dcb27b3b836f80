"""Write a results file, a line at a time, so that a crash loses nothing."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from harness.provenance import environment
from harness.redaction import current, redacted_arguments
from harness.results.records import ProfileText, Record, RunHeader
from harness.safe_io.writing import append_or_nothing, open_new


class Writer:
    """Writes records to a new results file; each is on its way to the disk before :meth:`write` returns.

    No record has credentials in it (:mod:`harness.redaction`).  Only the profile is written as it is: its hash is in
    the header, and it would have been refused if it had any.

    Errors: OSError, where anything is there, a link as well.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = open_new(path)
        self._encoder = msgspec.json.Encoder()
        self._digest = hashlib.sha256()

    def write(self, record: Record) -> None:
        """Append a record, or nothing.  Errors: OSError."""
        data = msgspec.to_builtins(record)
        if not isinstance(record, ProfileText):
            data = current().record(data)
        try:
            line = self._encoder.encode(data)
        except UnicodeEncodeError:  # half a surrogate pair, as in the name of a file that is not UTF-8
            text = json.dumps(data, ensure_ascii=False)
            line = text.encode(errors="replace")
        append_or_nothing(self._fd, line + b"\n")
        self._digest.update(line + b"\n")

    @property
    def digest(self) -> str:
        """SHA-256 of the file so far."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """See to it that the file outlives the machine.  Errors: OSError."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._fd = -1

    def abandon(self) -> None:
        """Leave the file as it is, and none where it is empty."""
        with contextlib.suppress(OSError):  # why it is abandoned has been said
            if not self.path.lstat().st_size:
                self.path.unlink()
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def torch_version() -> str:
    """As its installation says it, without importing it where it can be helped."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        import torch

        return str(torch.__version__)


def header(
    arguments: Iterable[str], profile: str = "", profile_hash: str = "", *, subject: str = "torch", **facts: Any
) -> RunHeader:
    """The first line of a run that starts now; ``facts``: other fields of it."""
    return RunHeader(
        started=time.time(),
        arguments=redacted_arguments(list(arguments)),
        environment=environment(),
        subject=subject,
        profile=profile,
        profile_hash=profile_hash,
        **facts,
    )
