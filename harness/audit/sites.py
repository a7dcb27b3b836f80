"""The sites in a module: places in its functions that can be edited, each with its edit.

An edit must not change which variables are free in a function, so removed code stays in the tree where it is never
reached.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib.util
import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.audit import operators

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_SAYS_ONLY = ("logger", "log", "logging", "warnings", "torch._C._log_api_usage_once", "_log_api_usage_once", "print")
"""Functions that only log or print; their calls are not mutated."""
_TYPES_ONLY = ("cast", "typing.cast", "assert_type", "TypeVar")


@dataclass(frozen=True)
class Site:
    """A place in a function, and the edit that is possible there."""

    function: str
    first: int
    """The first line of the function, including its decorators."""
    lines: tuple[int, int]
    edit: str
    path: tuple[tuple[str, int], ...]
    """The way from the tree to the node: names of fields, and indices (-1 if a field is not a list)."""
    make: Any
    """A function that makes the edited node from a copy of the node."""
    default: tuple[str, Any] | None = None
    """A parameter and its wrong default, if that is the edit: a default is no part of a function's code."""

    @property
    def key(self) -> str:
        return f"{self.function}: {self.edit}"


def file(module: str) -> str:
    """Return the path of a module.  Errors: ModuleNotFoundError."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.origin:
        raise ModuleNotFoundError(f"no module {module}")
    return spec.origin


@functools.cache
def _tree(module: str) -> ast.Module:
    path = file(module)
    return ast.parse(Path(path).read_text(), path)


def _at(node: Any, step: tuple[str, int]) -> Any:
    value = getattr(node, step[0])
    return value if step[1] < 0 else value[step[1]]


def _replace(tree: Any, path: tuple[tuple[str, int], ...], new: ast.AST) -> None:
    for step in path[:-1]:
        tree = _at(tree, step)
    name, index = path[-1]
    if index < 0:
        setattr(tree, name, new)
    else:
        getattr(tree, name)[index] = new


def edited(module: str, site: Site) -> types.CodeType:
    """Return the code of a site's function with the edit."""
    tree = copy.deepcopy(_tree(module))
    _replace(tree, site.path, site.make(functools.reduce(_at, site.path, tree)))
    ast.fix_missing_locations(tree)
    return _code_of(compile(tree, file(module), "exec", dont_inherit=True), site)


def _code_of(module: types.CodeType, site: Site) -> types.CodeType:
    pending = [module]
    while pending:
        code = pending.pop()
        if code.co_qualname == site.function and code.co_firstlineno == site.first:
            return code
        pending.extend(c for c in code.co_consts if isinstance(c, types.CodeType))
    raise LookupError(f"no code of {site.function} at line {site.first}")


@functools.cache
def sites_of(module: str) -> tuple[Site, ...]:
    """Return the sites in a module, in source order.  Errors: ModuleNotFoundError if there is no such module."""
    tree = _tree(module)
    return tuple(_in_body(tree, (), (), operators.world(tree)))


def _in_body(owner: Any, path: tuple[tuple[str, int], ...], names: tuple[str, ...], world: str) -> Iterator[Site]:
    """Yield the sites in the functions of a module or class."""
    for name in ("body", "orelse"):
        for i, node in enumerate(getattr(owner, name, ())):
            here = (*path, (name, i))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if not any(ast.unparse(d).endswith("overload") for d in node.decorator_list):
                    function = _Function(".".join((*names, node.name)), first, world)
                    yield from function.defaults(node, here)
                    yield from function.statements(node, here)
            elif isinstance(node, ast.ClassDef):
                yield from _in_body(node, here, (*names, node.name), world)
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _in_body(node, here, names, world)


@dataclass(frozen=True)
class _Function:
    """A function of a module, with methods that yield the sites in it."""

    name: str
    first: int
    world: str
    """How its module can refer to the default group; "" if it can't."""

    def defaults(self, node: Any, path: tuple[tuple[str, int], ...]) -> Iterator[Site]:
        """Yield the wrong defaults of the function itself, which are reached where its first statement is."""
        start = next((s for s in node.body if not _is_text(s)), node.body[0])
        for name, _, right, wrong in operators.of_defaults(node):
            edit = f"default of {name}: {right} to {wrong}"
            yield Site(self.name, self.first, _lines(start), edit, path, lambda node: node, (name, wrong))

    def site(self, path: tuple[tuple[str, int], ...], edit: str, make: Any) -> Site:
        return Site(self.name, self.first, (0, 0), edit, path, make)

    def statements(self, owner: Any, path: tuple[tuple[str, int], ...]) -> Iterator[Site]:
        for field in ("body", "orelse", "finalbody"):
            for i, node in enumerate(getattr(owner, field, ())):
                docstring = field == "body" and i == 0 and isinstance(owner, ast.FunctionDef) and _is_text(node)
                if not docstring:
                    yield from self.statement(node, (*path, (field, i)))
        for i, handler in enumerate(getattr(owner, "handlers", ())):
            yield from self.statements(handler, (*path, ("handlers", i)))

    def statement(self, node: Any, path: tuple[tuple[str, int], ...]) -> Iterator[Site]:
        for site in self.edits(node, path):
            yield site if site.lines[0] else replace(site, lines=_lines(node))

    def edits(self, node: Any, path: tuple[tuple[str, int], ...]) -> Iterator[Site]:
        if isinstance(node, ast.Expr) and (_is_text(node) or _only_says(node.value)):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):  # part of the function around it
            for name, way, right, wrong in operators.of_defaults(node):
                edit = f"default of {name} of {node.name}: {right} to {wrong}"
                yield self.site((*path, *way), edit, functools.partial(_constant, value=wrong))
            yield from self.statements(node, path)
            return
        if isinstance(node, ast.ClassDef | ast.Import | ast.ImportFrom | ast.Pass | ast.Global | ast.Nonlocal):
            return
        if isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Raise | ast.Assert) or (
            isinstance(node, ast.Assign) and not any(isinstance(t, ast.Name | ast.Tuple) for t in node.targets)
        ):
            yield self.site(path, f"leaves out: {_short(node)}", _never)
        if isinstance(node, ast.Raise | ast.Assert):
            if isinstance(node, ast.Assert):
                yield from self.expression(node.test, (*path, ("test", -1)))
            return  # error messages are not mutated
        if isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            yield self.site((*path, ("value", -1)), f"returns None for {_short(node.value)}", _none)
        if isinstance(node, ast.If | ast.While) and not isinstance(node.test, ast.Compare | ast.BoolOp):
            positive = not (isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not))
            if positive:
                yield self.site((*path, ("test", -1)), f"not ({_short(node.test)})", _negated)
        if isinstance(node, ast.For):
            yield self.site((*path, ("iter", -1)), f"no iteration over {_short(node.iter)}", _emptied)
        if isinstance(node, ast.Break):
            yield self.site(path, "break to continue", lambda node: ast.copy_location(ast.Continue(), node))
        if isinstance(node, ast.Continue):
            yield self.site(path, "continue to break", lambda node: ast.copy_location(ast.Break(), node))
        for way, edit, make in operators.of_statement(node, self.name.rpartition(".")[2]):
            site = self.site((*path, *way), edit, make)
            yield replace(site, lines=_lines(_at(node, way[0]))) if way[0][0] == "handlers" else site
        for field, value in ast.iter_fields(node):
            if field in ("body", "orelse", "finalbody", "handlers", "annotation", "target", "type_comment"):
                continue
            yield from self.field(value, path, field)
        yield from self.statements(node, path)

    def field(self, value: Any, path: tuple[tuple[str, int], ...], name: str) -> Iterator[Site]:
        if isinstance(value, ast.AST):
            yield from self.expression(value, (*path, (name, -1)))
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield from self.expression(item, (*path, (name, i)))

    def expression(self, node: Any, path: tuple[tuple[str, int], ...]) -> Iterator[Site]:
        if isinstance(node, ast.JoinedStr | ast.Lambda) or _only_says(node):
            return
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
            new = _COMPARISONS[type(node.ops[0])]
            yield self.site(path, f"{_short(node)}: {_symbol(new)}", functools.partial(_compared, new=new))
        elif isinstance(node, ast.BoolOp):
            other = ast.Or if isinstance(node.op, ast.And) else ast.And
            yield self.site(path, f"{_symbol(other)} in {_short(node)}", functools.partial(_with_op, new=other))
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self.site(path, f"without not: {_short(node)}", lambda node: node.operand)
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS and not _is_string(node):
            operator = _OPERATORS[type(node.op)]
            yield self.site(path, f"{_symbol(operator)} in {_short(node)}", functools.partial(_with_op, new=operator))
        elif isinstance(node, ast.IfExp):
            yield self.site((*path, ("test", -1)), f"not ({_short(node.test)})", _negated)
        elif isinstance(node, ast.Constant) and not isinstance(node.value, str | bytes | None | type(...)):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield self.site(path, f"{node.value} to {value}", functools.partial(_constant, value=value))
        elif isinstance(node, ast.Call):
            if ast.unparse(node.func) in _TYPES_ONLY:
                yield from self.expression(node.args[-1], (*path, ("args", len(node.args) - 1)))
                return
            for i, keyword in enumerate(node.keywords):
                if keyword.arg is not None:
                    edit = f"{_short(node.func)} without {keyword.arg}="
                    yield self.site(path, edit, functools.partial(_without, index=i))
        elif isinstance(node, ast.comprehension):
            for i, test in enumerate(node.ifs):
                if not isinstance(test, ast.Compare | ast.BoolOp):
                    yield self.site((*path, ("ifs", i)), f"not ({_short(test)})", _negated)
        for way, edit, make in operators.of_expression(node, self.world, _short):
            yield self.site((*path, *way), edit, make)
        for field, value in ast.iter_fields(node):
            if field != "ctx":
                yield from self.field(value, path, field)


def _lines(node: Any) -> tuple[int, int]:
    """Return the first and last line of a statement; of one with a block, of its head."""
    inner = [n.lineno for field in ("body", "handlers") for n in getattr(node, field, ())]
    return node.lineno, max(node.lineno, min(inner) - 1 if inner else node.end_lineno)


# edits


def _never(node: ast.stmt) -> ast.stmt:
    return ast.copy_location(ast.If(ast.Constant(False), [node], []), node)


def _none(node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.IfExp(ast.Constant(True), ast.Constant(None), node), node)


def _negated(node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.UnaryOp(ast.Not(), node), node)


def _emptied(node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.IfExp(ast.Constant(True), ast.Tuple([], ast.Load()), node), node)


def _compared(node: ast.Compare, new: type[ast.cmpop]) -> ast.Compare:
    node.ops = [new()]
    return node


def _with_op(node: Any, new: type) -> Any:
    node.op = new()
    return node


def _constant(node: ast.Constant, value: Any) -> ast.Constant:
    return ast.copy_location(ast.Constant(value), node)


def _without(node: ast.Call, index: int) -> ast.Call:
    node.keywords = node.keywords[:index] + node.keywords[index + 1 :]
    return node


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_string(node: ast.BinOp) -> bool:
    """Return whether a binary operation has a string literal or an f-string as an operand."""
    sides = (node.left, node.right)
    return any(
        isinstance(s, ast.JoinedStr) or (isinstance(s, ast.Constant) and isinstance(s.value, str)) for s in sides
    )


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _only_says(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    return name in _SAYS_ONLY or name.split(".")[0] in _SAYS_ONLY[:4]


def _short(node: ast.AST, most: int = 60) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= most else text[: most - 3] + "..."


_SYMBOLS = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Is: "is",
    ast.IsNot: "is not",
    ast.In: "in",
    ast.NotIn: "not in",
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.BitOr: "|",
    ast.BitAnd: "&",
    ast.And: "and",
    ast.Or: "or",
}


def _symbol(kind: type[ast.AST]) -> str:
    return _SYMBOLS[kind]
