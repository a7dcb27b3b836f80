"""The scripts of findings, and what their heads say: how to run them, and for which PyTorch they were written."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("docs/findings")
_RUN = "# Run:"
_RANKS = "--nproc-per-node="
_FRESH = re.compile(r"^# Python: fresh$", re.MULTILINE)
_SEEN = re.compile(r"^# Seen with torch (\d+(?:\.\d+)*)", re.MULTILINE)


@dataclass(frozen=True)
class Script:
    """A script of a finding."""

    path: Path
    ranks: int
    seen: str
    """The version of PyTorch for which it was written, without its build."""
    fresh: bool = False
    """Whether it needs a Python that has imported nothing: its head has ``# Python: fresh``."""

    @property
    def name(self) -> str:
        """Its name, which is the finding's id."""
        return self.path.stem


def scripts(root: Path) -> list[Script]:
    """Return the scripts of a checkout that run on the host, in the order of their names."""
    kept = []
    for path in sorted((root / FOLDER).glob("*.py")):
        text = path.read_text()
        ranks = [word.removeprefix(_RANKS) for word in command_in(text) if word.startswith(_RANKS)]
        seen = _SEEN.search(text)
        if ranks and seen is not None and not path.name.startswith("accelerator_"):
            kept.append(Script(path, int(ranks[0]), seen[1], fresh=_FRESH.search(text) is not None))
    return kept


def is_script(test: str) -> bool:
    """Return whether a test is a script that says how to run it, and not a node id of pytest."""
    return test.endswith(".py") and Path(test).is_file() and bool(command_of(Path(test)))


def command_of(script: Path) -> list[str]:
    """Return the command of a finding's script (:func:`command_in`); nothing if it can't be read."""
    try:
        return command_in(script.read_text(errors="replace"))
    except OSError:
        return []


def command_in(text: str) -> list[str]:
    """Return the command in a script's comment ``# Run:  torchrun …``; nothing if it has none."""
    lines = text.splitlines()[:20]
    return next((shlex.split(line.removeprefix(_RUN)) for line in lines if line.startswith(_RUN)), [])
