"""Files that commands write where the user asked for them."""

from __future__ import annotations

from pathlib import Path

from harness.safe_io.writing import append_or_nothing, write_whole


def appended(path: Path, data: bytes) -> None:
    """Append data to a file, such as the one of $GITHUB_STEP_SUMMARY, or create it. Errors: OSError."""
    if not path.exists():
        write_whole(path, data)
        return
    with path.open("ab", buffering=0) as stream:
        append_or_nothing(stream.fileno(), data)
