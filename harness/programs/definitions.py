"""Cut definitions out of modules, with everything that they need, to make a file that stands on its own."""

from __future__ import annotations

import ast
import functools
import symtable
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = "harness"
"""The package whose imports are left out of the text."""


@dataclass(frozen=True)
class _Parts:
    """The definitions and imports of a file."""

    imports: dict[str, str]
    """Import statements, by the name that each binds."""
    defined: dict[str, str]
    """Texts of definitions, by name."""
    borrowed: dict[str, str]
    """Modules of Concord that names are imported from, by name."""


def names_in(text: str) -> set[str]:
    """Return the global names that a text uses."""
    tables = [symtable.symtable(text, "text", "exec")]
    used = {symbol.get_name() for symbol in tables[0].get_symbols() if symbol.is_referenced()}
    while tables:
        tables += tables.pop().get_children()
        used |= {s.get_name() for table in tables for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    return used


def module_of(function: Callable[..., Any]) -> ModuleType:
    """Return the module in which a function is defined."""
    return sys.modules[function.__module__]


def definitions(modules: Iterable[ModuleType], wanted: set[str]) -> str:
    """Return the text of the definitions with these names, of all that they use in turn, and of their imports.

    ``modules`` are in the order in which their definitions appear in the text. A name refers to a definition in the
    module that uses it, otherwise to one that this module imports from another of the modules. A wanted name is looked
    up in all modules. Imports from Concord are left out.
    Errors: ValueError if a name would have two meanings in the text, or comes from a module of Concord that is not
    among the modules.
    """
    parts = {module.__name__: _parts(module.__file__ or "") for module in modules}
    needed: dict[str, str] = {}  # the module of each definition, by the definition's name
    imports: dict[str, str] = {}
    waiting = [(name, where) for name in sorted(wanted) if (where := _defining(parts, name))]
    for own in parts.values():
        _import(imports, own, wanted)
    while waiting:
        name, module = waiting.pop()
        if needed.setdefault(name, module) != module:
            raise ValueError(f"{name} is defined in {module} and in {needed[name]}")
        own = parts[module]
        if name in own.defined:
            used = names_in(own.defined[name])
            _import(imports, own, used)
            for each in used:
                where = module if each in own.defined else own.borrowed.get(each, "")
                if where and where not in parts:
                    raise ValueError(f"{module} takes {each} from {where}, which no reproducer has")
                if where and each not in needed:
                    waiting.append((each, where))
                elif where and needed[each] != where:
                    raise ValueError(f"{each} is defined in {where} and in {needed[each]}")
    if twice := set(imports) & set(needed):
        raise ValueError(f"{min(twice)} is defined in {needed[min(twice)]}, and imported elsewhere")
    bodies = [own.defined[name] for module, own in parts.items() for name in own.defined if needed.get(name) == module]
    return "\n".join(dict.fromkeys(imports.values())) + "\n\n\n" + "\n\n\n".join(bodies)


def _defining(parts: dict[str, _Parts], name: str) -> str:
    """Return the module that defines a name that the program's own text uses, or the last one if several do."""
    return next((module for module, own in reversed(parts.items()) if name in own.defined), "")


def _import(imports: dict[str, str], own: _Parts, used: set[str]) -> None:
    for name in own.imports:
        if name in used and imports.setdefault(name, own.imports[name]) != own.imports[name]:
            raise ValueError(f"{name} is imported by {own.imports[name]!r} and by {imports[name]!r}")


@functools.cache
def _parts(file: str) -> _Parts:
    text = Path(file).read_text()
    lines = text.splitlines()
    parts = _Parts({}, {}, {})
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == OURS:
            parts.borrowed.update({alias.asname or alias.name: node.module or "" for alias in node.names})
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            if isinstance(node, ast.ImportFrom) and node.module == "__future__":
                continue
            for alias in node.names:
                given = (alias.asname or alias.name).split(".")[0]
                name = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
                of = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                parts.imports[given] = f"{of}import {name}"
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            parts.defined[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id != "__all__":
                parts.defined[target.id] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return parts


__all__ = ["definitions", "module_of", "names_in"]
