"""Edits that stand for mistakes of people who know the code: swapped arguments, the wrong group, a lost copy.

:mod:`harness.audit.sites` has the edits of single tokens and statements.  Each function here takes a node and yields
what can be done to it: where (a way from the node), the edit in words, and a function that makes the edited node.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

Way = tuple[tuple[str, int], ...]
"""Names of fields, and indices (-1 if a field is not a list)."""
Edit = tuple[Way, str, Callable[[Any], ast.AST]]

_COPIES = ("clone", "contiguous", "copy", "detach", "to")
"""Methods whose result can be mistaken for the object itself."""
_COPIES_OF = ("list", "dict", "tuple", "set", "copy.copy", "copy.deepcopy")
_ANY_ORDER = ("isinstance", "issubclass", "hasattr", "getattr", "setattr", "super", "zip", "max", "min", "len", "print")
"""Functions whose arguments nobody swaps without an error at once, or that take them in any order."""
_GROUP = re.compile(r"(^|_)(process_group|group|pg)$")
_GROUP_NAME = re.compile(r"(^|_)group_name$")


def world(module: ast.Module) -> str:
    """Return how a module can refer to the default group: an expression of names that it imports; "" if it can't."""
    for node in module.body:
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name == "torch.distributed" and name.asname:
                    return f"{name.asname}.group.WORLD"
                if name.name.split(".")[0] == "torch" and not name.asname:
                    return "torch.distributed.group.WORLD"
    return ""


def of_expression(node: ast.AST, world: str, short: Callable[[ast.AST], str]) -> Iterator[Edit]:
    """Yield the edits of an expression.  ``world``: from :func:`world`; ``short``: the words for a node."""
    if isinstance(node, ast.Slice):
        yield from _slice(node, short)
    if not isinstance(node, ast.Call):
        return
    function = ast.unparse(node.func)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _COPIES and not function.startswith("torch."):
        yield (), f"without .{node.func.attr}() of {short(node.func.value)}", lambda node: node.func.value
    if function in _COPIES_OF and len(node.args) == 1 and not isinstance(node.args[0], ast.GeneratorExp | ast.Starred):
        yield (), f"no copy: {short(node)}", lambda node: node.args[0]
    if function == "range" and node.args:
        last = 0 if len(node.args) == 1 else 1
        yield (("args", last),), f"{short(node)} ends one earlier", _less
    if function not in _ANY_ORDER:
        for i, (one, other) in enumerate(zip(node.args, node.args[1:], strict=False)):
            if not any(isinstance(a, ast.Starred) for a in (one, other)) and ast.dump(one) != ast.dump(other):
                yield (), f"{short(one)} and {short(other)} swapped in {short(node)}", _swapping(i)
    if world:
        yield from _groups(node, world, short)


def of_statement(node: ast.AST, function: str) -> Iterator[Edit]:
    """Yield the edits of a statement.  ``function``: the name of the function around it."""
    if isinstance(node, ast.Assign) and function not in ("__init__", "__new__"):
        for target in node.targets:
            if isinstance(target, ast.Attribute):
                yield (("value", -1),), f"{ast.unparse(target)} keeps its first value", _first_of(target)
    if isinstance(node, ast.Try):
        for i, handler in enumerate(node.handlers):
            if not all(isinstance(s, ast.Pass) for s in handler.body):
                kind = ast.unparse(handler.type) if handler.type else "everything"
                yield (("handlers", i),), f"swallows {kind}", _swallowed


def of_defaults(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, Way, Any, Any]]:
    """Yield the defaults that can be wrong: parameter, where, the right value and a wrong one."""
    positional = [*node.args.posonlyargs, *node.args.args]
    named = positional[len(positional) - len(node.args.defaults) :]
    found = [(a.arg, ("defaults", i), d) for i, (a, d) in enumerate(zip(named, node.args.defaults, strict=True))]
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    found += [(a.arg, ("kw_defaults", i), d) for i, (a, d) in enumerate(pairs) if d is not None]
    for name, step, default in found:
        if isinstance(default, ast.Constant) and isinstance(default.value, bool | int | float):
            right = default.value
            wrong: Any = not right if isinstance(right, bool) else right + 1
            yield name, (("args", -1), step), right, wrong


def _slice(node: ast.Slice, short: Callable[[ast.AST], str]) -> Iterator[Edit]:
    if node.lower is not None:
        yield (("lower", -1),), f"[{short(node)}] begins one later", _more
    elif node.upper is not None:
        yield (), f"[{short(node)}] begins one later", _from_one
    if node.upper is not None:
        yield (("upper", -1),), f"[{short(node)}] ends one earlier", _less


def _groups(node: ast.Call, world: str, short: Callable[[ast.AST], str]) -> Iterator[Edit]:
    """Yield the default group for each argument that is a group or the name of one."""
    arguments: list[tuple[Way, ast.expr]] = [((("args", i),), a) for i, a in enumerate(node.args)]
    arguments += [((("keywords", i), ("value", -1)), k.value) for i, k in enumerate(node.keywords) if k.arg]
    for way, value in arguments:
        if not isinstance(value, ast.Name | ast.Attribute) or ast.unparse(value).endswith("group.WORLD"):
            continue
        name = value.id if isinstance(value, ast.Name) else value.attr
        for pattern, text in ((_GROUP, world), (_GROUP_NAME, f"{world}.group_name")):
            if pattern.search(name):
                yield way, f"the default group for {short(value)} in {short(node)}", _other(text)


def _other(text: str) -> Callable[[ast.expr], ast.expr]:
    return lambda node: _located(ast.parse(text, mode="eval").body, node)


def _located(new: Any, old: Any) -> Any:
    for node in ast.walk(new):
        ast.copy_location(node, old)
    return new


def _more(node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.BinOp(node, ast.Add(), ast.Constant(1)), node)


def _less(node: ast.expr) -> ast.expr:
    return ast.copy_location(ast.BinOp(node, ast.Sub(), ast.Constant(1)), node)


def _from_one(node: ast.Slice) -> ast.Slice:
    node.lower = ast.Constant(1)
    return node


def _swapping(first: int) -> Callable[[ast.Call], ast.Call]:
    def swapped(node: ast.Call) -> ast.Call:
        node.args[first], node.args[first + 1] = node.args[first + 1], node.args[first]
        return node

    return swapped


def _first_of(target: ast.Attribute) -> Callable[[ast.expr], ast.expr]:
    """Return an edit that takes what an attribute has already, unless that is nothing or None."""

    def first(value: ast.expr) -> ast.expr:
        owner = copy.deepcopy(target.value)
        held = ast.Attribute(owner, target.attr, ast.Load())
        asked = ast.Call(
            ast.Name("getattr", ast.Load()),
            [copy.deepcopy(owner), ast.Constant(target.attr), ast.Constant(None)],
            [],
        )
        test = ast.Compare(asked, [ast.IsNot()], [ast.Constant(None)])
        return ast.copy_location(ast.IfExp(_located(test, value), _located(held, value), value), value)

    return first


def _swallowed(handler: ast.ExceptHandler) -> ast.ExceptHandler:
    handler.body = [_never_reached(handler.body)]
    return handler


def _never_reached(body: list[ast.stmt]) -> ast.stmt:
    """Return a statement that does nothing, but has the names of a block, so that no variable becomes another kind."""
    return ast.copy_location(ast.If(ast.Constant(False), body, []), body[0])
