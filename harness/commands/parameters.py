"""The parameters of PyTorch's public functions: which test has which value, as tables and as pages.

The command ``concord parameters`` writes docs/parameters/ from fixtures/parameters/*.toml, which people keep.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from harness.commands.outputs import INDEX, Check, PagesFolder, pages_out, require_folder
from harness.commands.refusing import bad
from harness.commands.tables import TableError, document, escaped, read_all, words

FOLDER = "fixtures/parameters"
PAGES = "docs/parameters"
CALL = "()"
"""The parameter that stands for the call itself, of a function without parameters."""
UNTESTED, GAP = "not tested: ", "gap: "
_TORCH, _OUTSIDE = "torch", "outside"


@dataclass(frozen=True)
class Parameter:
    """A parameter: where each of its values is tested, or why not."""

    values: Mapping[str, str]
    """A test (``file::name``), or a reason after :data:`UNTESTED` or :data:`GAP`, by value."""
    torch: str = ""
    """The versions of PyTorch that have it, as a specifier; empty: all that have the function."""


@dataclass(frozen=True)
class Function:
    """A function with its parameters, or why it is outside of the stack."""

    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    torch: str = ""
    outside: str = ""
    """Why it is no part of the stack; for a class this holds for its methods, too."""


Table = Mapping[str, Function]


def parse(text: str, file: str) -> Table:
    """Parse the table of one stack.  ``file``: its name in messages.  Errors: :class:`TableError`."""
    return {name: _function(body, f"{file}: {name}") for name, body in document(text, file).items()}


def read(root: Path) -> dict[str, Table]:
    """Read the tables of all stacks, by stack.  Errors: :class:`TableError`."""
    return read_all(root / FOLDER, parse)


def _function(body: Any, where: str) -> Function:
    if not isinstance(body, dict):
        raise TableError(f"{where}: must be a table of parameters")
    rest = dict(body)
    torch = _specifier(rest.pop(_TORCH, ""), where)
    outside = rest.pop(_OUTSIDE, None)
    if outside is not None:
        if rest:
            raise TableError(f"{where}: has '{_OUTSIDE}', so it must have no parameters: {', '.join(rest)}")
        return Function(torch=torch, outside=words(outside, f"{where}: {_OUTSIDE}"))
    if not rest:
        raise TableError(f"{where}: needs parameters, '\"{CALL}\"' if it has none, or '{_OUTSIDE}' with a reason")
    if CALL in rest and len(rest) > 1:
        raise TableError(f"{where}: '{CALL}' stands alone, for a function without parameters")
    return Function({name: _parameter(each, f"{where}: {name}") for name, each in rest.items()}, torch)


def _parameter(body: Any, where: str) -> Parameter:
    if not isinstance(body, dict):
        raise TableError(f"{where}: must be a table of values")
    values = dict(body)
    torch = _specifier(values.pop(_TORCH, ""), where)
    if not values:
        raise TableError(f"{where}: needs a value")
    return Parameter({value: _proof(each, f"{where}: {value}") for value, each in values.items()}, torch)


def _proof(text: Any, where: str) -> str:
    proof = words(text, where)
    if proof.startswith((UNTESTED, GAP)):
        words(proof.partition(": ")[2], where)
        return proof
    file, colons, name = proof.partition("::")
    if not (colons and file.startswith("suites/") and file.endswith(".py") and name.isidentifier()):
        raise TableError(
            f"{where}: must be a test such as 'suites/x/test_y.py::test_z', or a reason after '{UNTESTED}' or '{GAP}'"
        )
    return proof


def _specifier(text: Any, where: str) -> str:
    try:
        return str(text) if SpecifierSet(text) or not text else ""
    except (InvalidSpecifier, TypeError, AttributeError):
        raise TableError(f"{where}: {_TORCH} must be a specifier of versions such as '>=2.13'") from None


def disagreements(table: Table, surface: Mapping[str, Sequence[str]], torch: str) -> list[str]:
    """Return where a table and a version of PyTorch disagree.

    ``surface``: the parameters of each public function of the installed PyTorch, whose version is ``torch``.
    """
    there = Version(torch).release
    version = ".".join(map(str, there))
    problems = []
    for name, parameters in surface.items():
        function = table.get(name)
        if function is None:
            if not _is_outside(name, table):
                problems.append(f"{name}: the table lacks it")
        elif not _has(function.torch, version):
            problems.append(f"{name}: PyTorch {version} has it, and the table says {function.torch}")
        elif not function.outside:
            problems += _of_parameters(name, function, parameters or [CALL], version)
    problems += [
        f"{name}: PyTorch {version} lacks it; remove it, or say which versions have it"
        for name, function in table.items()
        if name not in surface and _has(function.torch, version)
    ]
    return problems


def _of_parameters(name: str, function: Function, there: Sequence[str], version: str) -> Iterator[str]:
    for parameter in there:
        entry = function.parameters.get(parameter)
        if entry is None:
            yield f"{name}: the table lacks the parameter {parameter}"
        elif not _has(entry.torch, version):
            yield f"{name}: PyTorch {version} has the parameter {parameter}, and the table says {entry.torch}"
    for parameter, entry in function.parameters.items():
        if parameter not in there and _has(entry.torch, version):
            yield f"{name}: PyTorch {version} lacks the parameter {parameter}; remove it, or say which versions have it"


def _has(specifier: str, version: str) -> bool:
    return SpecifierSet(specifier).contains(version, prereleases=True)


def _is_outside(name: str, table: Table) -> bool:
    owner = table.get(name.rpartition(".")[0])
    return owner is not None and bool(owner.outside)


def unknown_tests(table: Table, root: Path) -> list[str]:
    """Return the entries that name a test which the suites of a checkout do not have."""
    names: dict[str, set[str]] = {}
    problems = []
    for where, proof in _proofs(table):
        file, _, test = proof.partition("::")
        if file not in names:
            names[file] = _tests_in(root / file)
        if not proof.startswith((UNTESTED, GAP)) and test not in names[file]:
            problems.append(f"{where}: there is no test {proof}")
    return problems


def _tests_in(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def _proofs(table: Table) -> Iterator[tuple[str, str]]:
    for name, function in table.items():
        for parameter, entry in function.parameters.items():
            for value, proof in entry.values.items():
                yield f"{name}: {parameter}: {value}", proof


def pages(tables: Mapping[str, Table]) -> dict[str, str]:
    """Render the tables as Markdown: pages by the name of their file, one for each stack."""
    texts = {INDEX: [_INTRODUCTION]}
    for stack, table in tables.items():
        inside = [function for function in table.values() if not function.outside]
        proofs = Counter(_kind(proof) for _, proof in _proofs(table))
        counts = (
            len(inside),
            sum(len(function.parameters) for function in inside),
            proofs.total(),
            *(proofs[kind] for kind in ("", UNTESTED, GAP)),
        )
        texts[INDEX].append(f"| [`{stack}`]({stack}.md) | {' | '.join(map(str, counts))} |")
    for stack, table in tables.items():
        lines = texts[f"{stack}.md"] = [_GENERATED, "", f"# Parameters: {stack}", ""]
        lines += [f"[Parameters]({INDEX}) says how to read this page.", ""]
        lines += ["| function | parameter | value | test |", "|---|---|---|---|"]
        lines += _rows(table)
        outside = {name: function for name, function in table.items() if function.outside}
        if outside:
            lines += ["", f"Outside of `{stack}`:", "", "| function | why |", "|---|---|"]
            lines += [
                f"| `{name}`{_since(function.torch)} | {escaped(function.outside)} |"
                for name, function in outside.items()
            ]
    return {name: "\n".join(lines) + "\n" for name, lines in texts.items()}


def _rows(table: Table) -> Iterator[str]:
    for name, function in table.items():
        shown = f"`{name}`{_since(function.torch)}"
        for parameter, entry in function.parameters.items():
            named = "the call" if parameter == CALL else f"`{parameter}`{_since(entry.torch)}"
            for value, proof in entry.values.items():
                yield f"| {shown} | {named} | {escaped(value)} | {_shown(proof)} |"


def _shown(proof: str) -> str:
    kind = _kind(proof)
    if kind:
        return f"{'**gap**' if kind == GAP else 'not tested'}: {escaped(proof.removeprefix(kind))}"
    file, _, test = proof.partition("::")
    return f"[`{test}`](../../{file})"


def _kind(proof: str) -> str:
    return next((kind for kind in (UNTESTED, GAP) if proof.startswith(kind)), "")


def _since(specifier: str) -> str:
    return f" ({escaped(specifier)})" if specifier else ""


_GENERATED = f"<!-- Generated from {FOLDER}/ by: concord parameters {PAGES} -->"
_INTRODUCTION = f"""\
{_GENERATED}

# Parameters

Every parameter of every public function of the stacks, the values of it that mean something, and a test in which
PyTorch gets this value.

- **not tested** says why no test of the suites can have the value, or what stands for it.
- **gap** marks a value that a test ought to have. `pytest -p harness.commands.given FILE`, with a file of the suites,
  lists the gaps that the calls of its tests fill.
- A version in parentheses says which versions of PyTorch have the function or the parameter.

Which functions are public, and which parameters they have, is computed from the installed PyTorch
(`harness/stacks/surface.py`). `tests/unit/test_parameters.py` fails if a table lacks one of them, or names a test or a
parameter that does not exist. These pages are generated. To change one, change `{FOLDER}/STACK.toml` and run
`concord parameters {PAGES}`.

| stack | functions | parameters | values | tested | not tested | gaps |
|---|---|---|---|---|---|---|"""


def parameters(folder: PagesFolder = None, check: Check = False) -> None:
    """Write the table of parameters: every public function of the stacks, and the test of each value.

    Run it in a checkout of Concord.
    """
    require_folder(folder, check)
    try:
        texts = pages(read(Path.cwd()))
    except TableError as e:
        raise bad(str(e)) from None
    pages_out(texts, folder, check, "parameters")
