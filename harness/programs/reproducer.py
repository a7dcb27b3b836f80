"""Reproducers: files that show how a program fails, and need only torch and torchrun.

A file has the program's source, the definitions that it uses, and the main function of
:mod:`harness.programs.standalone`, which trains alone and on ranks and compares the two. It prints expected and
observed values and exits with 1 if the defect is present, and with 0 if not.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch

from harness.devices import backend_for
from harness.programs import prelude, standalone
from harness.programs.check import Truth
from harness.programs.definitions import definitions, module_of, names_in
from harness.programs.literals import literal, name
from harness.programs.options import promises_of
from harness.programs.problem import Problem
from harness.programs.source import source
from harness.programs.stored import dumps
from harness.redaction import recorded, redacted
from harness.safe_io.shown import printable
from harness.safe_io.writing import own_folder, write_whole
from harness.specs.program import Program
from harness.stacks import seen, training
from harness.stacks.registry import stack_of
from harness.stacks.seen import Seen
from harness.subjects import TORCH

FOLDER = "CONCORD_REPRODUCERS"
"""The environment variable that names the folder for reproducers; the default is reports/out/reproducers."""

_PASSED_ON = ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_FR_BUFFER_SIZE")


def reproducer(
    program: Program,
    *,
    what: str,
    problems: Sequence[Problem] = (),
    truth: Truth | None = None,
    backend: str = "",
    device: str = "cpu",
    subject: str = "torch",
    limit: int = 120,
) -> str:
    """Return the text of a file that shows how a program fails.

    ``what``: what was seen, for the head of the file; ``problems``: the same as data, which selects what is compared
    with a tolerance; ``truth``: the single device's results, or None if ranks did not get far enough to be compared;
    ``backend``: by default torch's own for the device; ``subject``: whose stacks the failure was seen with; ``limit``:
    seconds after which a run counts as a hang.
    """
    backend = backend or backend_for(device)
    text = source(program)
    case = _case(program, problems, truth, backend=backend, device=device, limit=limit)
    standing_on = definitions(_modules(program), names_in(text) | names_in(case) | {"main"})
    head = _head(program, what, backend, subject)
    last = 'if __name__ == "__main__":\n    main(CASE, build, distribute, train)'
    return "\n\n\n".join([head, standing_on, text.strip(), case, last]) + "\n"


def _modules(program: Program) -> list[ModuleType]:
    """Return the modules whose definitions a reproducer takes, in the order in which it has them."""
    return [seen, training, module_of(stack_of(program.layout).apply), prelude, standalone]


def _case(
    program: Program, problems: Sequence[Problem], truth: Truth | None, *, backend: str, device: str, limit: int
) -> str:
    """Return the source of the constant that says how the program is run and what is checked on ranks."""
    layout, promises = program.layout, promises_of(program)
    missing = [problem.what for problem in problems if problem.kind == "missing"]
    words = {
        "world": literal(layout.world),
        "backend": repr(str(backend)),
        "device": repr(str(device)),
        "dtype": f"torch.{name(program.dtype)}",
        "tensor": literal(layout.tensor),
        "rotated": literal(program.rotated),
        "parts": literal(program.parts),
        "limit": literal(limit),
        "allowed": _allowed(truth, problems),
        "promised": f"frozenset({_listed(_key(what) for what in dict.fromkeys(missing) if isinstance(what, Seen))})",
        "zeros_allowed": literal(promises.zeros_for_unused),
        "synced": literal(layout.world > layout.tensor),
        "quiet_unsynced": literal(not promises.unsynced_collectives and layout.tensor == 1),
        "compiled": literal(layout.compiled is not None),
        "same_shapes": literal(program.even),
    }
    return "\n".join(["CASE = Case(", *(f"    {word}={value}," for word, value in words.items()), ")"])


def write(
    program: Program,
    name: str,
    *,
    what: str,
    problems: Sequence[Problem] = (),
    truth: Truth | None,
    backend: str,
    device: str,
    subject: str = "torch",
) -> tuple[Path, str]:
    """Write ``repro_<name>.py`` and, beside it, the program as JSON. Returns the file and the command that runs it."""
    folder = Path(os.environ.get(FOLDER) or Path("reports") / "out" / "reproducers")
    file = own_folder(folder) / f"repro_{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')[:100]}.py"
    text = reproducer(
        program, what=what, problems=problems, truth=truth, backend=backend, device=device, subject=subject
    )
    write_whole(file, text, follow=False)
    write_whole(file.with_suffix(".json"), dumps(program), follow=False)
    return file, shlex.join(["torchrun", f"--nproc-per-node={program.layout.world}", str(file)])


def _allowed(truth: Truth | None, problems: Sequence[Problem]) -> str:
    """Return the source of the tolerances of the tensors that differed; None if bits must agree."""
    if truth is None or truth.bounded is None:
        return "None"
    differed = {problem.what for problem in problems}
    tolerances = {key: t.flatten().tolist() for key, t in truth.bounded.tolerance.items() if key in differed}
    lines = [f"        {_key(key)}: {_listed(map(_float, numbers))}," for key, numbers in tolerances.items()]
    return "\n".join(["{", *lines, "    }"]) if lines else "{}"


def _key(seen: Seen) -> str:
    """Return the source of a tensor's key: strings, numbers and booleans from the single device's run."""
    given = {field: value for field, value in seen._asdict().items() if value != Seen._field_defaults.get(field)}
    return f"Seen({', '.join(f'{field}={value!r}' for field, value in given.items())})"


def _listed(items: Iterable[str]) -> str:
    return f"[{', '.join(items)}]"


def _float(number: float) -> str:
    return repr(number) if math.isfinite(number) else f'float("{number}")'


def _head(program: Program, what: str, backend: str, subject: str) -> str:
    lines = [f"A training run that is not on {program.layout.world} ranks what it is on one device.", ""]
    lines += [f"    torchrun --nproc-per-node={program.layout.world} {{this file}}", "", "What was seen:", ""]
    lines += [f"    {line[:200]}" for line in printable(redacted(what)).splitlines()[:20]]
    environment: Mapping[str, str] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": backend,
        "subject": subject,
        **{name: shown for name in _PASSED_ON if (shown := recorded(name, os.environ.get(name, "")))},
    }
    if subject != TORCH:
        lines += [
            "",
            f"It was seen on the subject {subject!r}.  This file runs on the stacks of torch: it tells whether",
        ]
        lines += ["they have the same defect."]
    lines += ["", "Environment:", "", *(f"    {key}: {value}" for key, value in environment.items())]
    # Every line must stay a comment, whatever it says, so line breaks within it are removed.
    return "\n".join(f"# {printable(line).replace(chr(10), ' ')}".rstrip() for line in lines)


def name_of_test() -> str:
    """Return the id of the running test, as pytest gives it, or ``program`` outside of a test."""
    return os.environ.get("PYTEST_CURRENT_TEST", "program").split(" ")[0].removeprefix("suites/")


__all__ = ["FOLDER", "name_of_test", "reproducer", "write"]
