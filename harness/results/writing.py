"""The writer of results files, which writes a line at a time so that a crash loses nothing."""

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
    """A writer of records to a new results file; :meth:`write` returns once the operating system has the record.

    Credentials are removed from every record except the profile (:mod:`harness.redaction`).  The profile is written as
    it is, because the header has its hash, and a profile with credentials would have been refused.

    Errors: OSError if the path exists, even as a link.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = open_new(path)
        self._encoder = msgspec.json.Encoder()
        self._digest = hashlib.sha256()

    def write(self, record: Record) -> None:
        """Append the whole record or nothing.  Errors: OSError."""
        data = msgspec.to_builtins(record)
        if not isinstance(record, ProfileText):
            data = current().record(data)
        try:
            line = self._encoder.encode(data)
        except UnicodeEncodeError:  # half a surrogate pair, as in a file name that is not UTF-8
            text = json.dumps(data, ensure_ascii=False)
            line = text.encode(errors="replace")
        append_or_nothing(self._fd, line + b"\n")
        self._digest.update(line + b"\n")

    @property
    def digest(self) -> str:
        """The SHA-256 of the file so far."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Flush the file to the disk and close it.  Errors: OSError."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)
            self._fd = -1

    def abandon(self) -> None:
        """Close the file as it is, and remove it if it is empty."""
        with contextlib.suppress(OSError):  # the error that led here has been reported
            if not self.path.lstat().st_size:
                self.path.unlink()
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def torch_version() -> str:
    """Return torch's version from its metadata; without metadata, import torch and ask it."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        import torch

        return str(torch.__version__)


def header(
    arguments: Iterable[str], profile: str = "", profile_hash: str = "", *, subject: str = "torch", **facts: Any
) -> RunHeader:
    """Make the first record of a run that starts now.

    ``arguments``: the command line; ``facts``: other fields of :class:`RunHeader`.
    """
    return RunHeader(
        started=time.time(),
        arguments=redacted_arguments(list(arguments)),
        environment=environment(),
        subject=subject,
        profile=profile,
        profile_hash=profile_hash,
        **facts,
    )
