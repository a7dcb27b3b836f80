"""Reproducers: a program that failed as one file that needs only torch, to be run with torchrun.

The file has the program's source, the definitions that it stands on, and the main function of
:mod:`harness.programs.standalone`, which trains alone and on ranks and compares.  It prints expected and observed
values and exits with 1 if the defect is there, and exits with 0 if not.
"""

from __future__ import annotations

import ast
import functools
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
from harness.programs.literals import literal, name
from harness.programs.problem import Problem
from harness.programs.source import source
from harness.programs.spec import Program
from harness.programs.stored import dumps
from harness.redaction import recorded, redacted
from harness.safe_io.shown import printable
from harness.safe_io.writing import own_folder, write_whole
from harness.stacks import seen, training
from harness.stacks.seen import Seen
from harness.subjects import TORCH

FOLDER = "CONCORD_REPRODUCERS"
"""Environment variable that names the folder; reports/out/reproducers is the default."""

_PASSED_ON = ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_FR_BUFFER_SIZE")

MODULES = (seen, training, prelude, standalone)
"""Whose definitions are cut out, in the order in which they stand in a reproducer."""


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
    """The text of a file that shows how a program fails.

    ``what``: what was seen, for the head of the file; ``problems``: the same, as data, which says what is compared
    beyond bits; ``truth``: what the single device said, None where ranks did not
    get far enough to be compared; ``backend``: torch's own for the device, where it is empty; ``subject``: whose stacks
    it was seen with; ``limit``: seconds after which a hang is called one.
    """
    backend = backend or backend_for(device)
    text = source(program)
    case = _case(program, problems, truth, backend=backend, device=device, limit=limit)
    standing_on = definitions(MODULES, _names(text) | _names(case) | {"main"})
    head = _head(program, what, backend, subject)
    last = 'if __name__ == "__main__":\n    main(CASE, build, distribute, train)'
    return "\n\n\n".join([head, standing_on, text.strip(), case, last]) + "\n"


def _case(
    program: Program, problems: Sequence[Problem], truth: Truth | None, *, backend: str, device: str, limit: int
) -> str:
    """The source of the constant that says how the program is run, and what is asked of ranks."""
    layout = program.layout
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
        "zeros_allowed": literal(layout.under == "tp_extension"),
        "synced": literal(layout.world > layout.tensor),
        "quiet_unsynced": literal(layout.under != "tp_extension"),
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
    """Write ``repro_<name>.py`` and the program beside it, as JSON; returns the file, and the command that runs it."""
    folder = Path(os.environ.get(FOLDER) or Path("reports") / "out" / "reproducers")
    file = own_folder(folder) / f"repro_{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')[:100]}.py"
    text = reproducer(
        program, what=what, problems=problems, truth=truth, backend=backend, device=device, subject=subject
    )
    write_whole(file, text, follow=False)
    write_whole(file.with_suffix(".json"), dumps(program), follow=False)
    return file, shlex.join(["torchrun", f"--nproc-per-node={program.layout.world}", str(file)])


def _allowed(truth: Truth | None, problems: Sequence[Problem]) -> str:
    """The source of the tolerances of what differed; None where bits must be right."""
    if truth is None or truth.bounded is None:
        return "None"
    differed = {problem.what for problem in problems}
    tolerances = {key: t.flatten().tolist() for key, t in truth.bounded.tolerance.items() if key in differed}
    lines = [f"        {_key(key)}: {_listed(map(_float, numbers))}," for key, numbers in tolerances.items()]
    return "\n".join(["{", *lines, "    }"]) if lines else "{}"


def _key(seen: Seen) -> str:
    """The source of what a tensor is known by: strings, numbers and booleans of the single device's run."""
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
    # Whatever it says, a comment is a comment: a line has no end but its own.
    return "\n".join(f"# {printable(line).replace(chr(10), ' ')}".rstrip() for line in lines)


def _names(text: str) -> set[str]:
    """Every name that a text uses."""
    tree = ast.parse(text)
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        n.value.id for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)
    }


def definitions(modules: Iterable[ModuleType], wanted: set[str]) -> str:
    """The text of the definitions with these names, of all that they use in turn, and of the imports for them.

    ``modules`` come in the order in which their definitions are to stand.  Imports from Concord are left out: what they
    name must be in one of the modules.
    """
    found = [_parts(module.__file__ or "") for module in modules]
    texts = {name: text for _, defined in found for name, text in defined.items()}
    needed: set[str] = set()
    waiting = [name for name in wanted if name in texts]
    used = set(wanted)
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed.add(name)
            names = _names(texts[name])
            used |= names
            waiting += [n for n in names if n in texts]
    imports = {line: None for lines, _ in found for names, line in lines if names & used}
    bodies = [text for _, defined in found for name, text in defined.items() if name in needed]
    return "\n".join(imports) + "\n\n\n" + "\n\n\n".join(bodies)


@functools.cache
def _parts(file: str) -> tuple[list[tuple[frozenset[str], str]], dict[str, str]]:
    """The imports of a file, each with one line and the names that it gives, and its definitions by name."""
    text = Path(file).read_text()
    lines = text.splitlines()
    imports: list[tuple[frozenset[str], str]] = []
    defined: dict[str, str] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "harness":
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                given = (alias.asname or alias.name).split(".")[0]
                name = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
                line = f"from {node.module} import {name}" if isinstance(node, ast.ImportFrom) else f"import {name}"
                always = node.module == "__future__" if isinstance(node, ast.ImportFrom) else False
                if not always:
                    imports.append((frozenset({given}), line))
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            defined[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id != "__all__":
            defined[node.targets[0].id] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return imports, defined


def name_of_test() -> str:
    """Of the test that is running, as pytest tells it; ``program`` outside of one."""
    return os.environ.get("PYTEST_CURRENT_TEST", "program").split(" ")[0].removeprefix("suites/")


__all__ = ["FOLDER", "definitions", "name_of_test", "reproducer", "write"]
