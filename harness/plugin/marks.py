"""``@pytest.mark.world(...)`` and the ``@spmd`` decorator."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness.worlds.network import NETWORKS

DEFAULT_SIZES = (2,)
MEASURED = "measured"
_NONE = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "backend": (str, _NONE),
    "device": (str, _NONE),
    "warm": (bool, _NONE),
    "exclusive": (bool, str),
    "record": (bool,),
    "network": (str, _NONE),
}


@dataclass(frozen=True)
class WorldMark:
    """The arguments of ``@pytest.mark.world``, checked."""

    sizes: tuple[int, ...] = DEFAULT_SIZES
    backend: str | None = None
    device: str | None = None
    warm: bool | None = None
    timeout: float | None = None
    env: tuple[tuple[str, str], ...] = ()
    exclusive: bool | str = False
    """Whether nothing else may run meanwhile; :data:`MEASURED`: only if benchmarks are measured."""
    imports: tuple[str, ...] = ()
    record: bool = True
    network: str | None = None
    """``private`` or ``host``, whatever the run's option is; see :class:`harness.worlds.world.WorldSpec`."""
    hosts: int | None = None
    """The number of hosts that the ranks are spread over; None: as the run's options say."""
    keeps: str = ""
    """Why tensors or settings of the test outlive its functions on the ranks; empty: they must not."""

    def __post_init__(self) -> None:
        bad = [size for size in self.sizes if not isinstance(size, int) or isinstance(size, bool) or size < 1]
        if bad:
            raise ValueError(f"a world size is a whole number from 1, not {bad[0]!r}")
        if not self.sizes:
            raise ValueError("no world size given: write for example @pytest.mark.world(2)")
        if len(set(self.sizes)) != len(self.sizes):
            raise ValueError(f"a world size is given twice: {self.sizes}")
        if isinstance(self.exclusive, str) and self.exclusive != MEASURED:
            raise ValueError(f"exclusive={self.exclusive!r}: True, False or {MEASURED!r}")
        if self.network is not None and self.network not in NETWORKS:
            raise ValueError(f"network={self.network!r}: {', '.join(NETWORKS[:-1])} or {NETWORKS[-1]}")
        if self.timeout is not None and not (isinstance(self.timeout, int | float) and self.timeout > 0):
            raise ValueError(f"timeout={self.timeout!r}: a number of seconds above 0")
        for key, kinds in _KINDS.items():
            value = getattr(self, key)
            if not isinstance(value, kinds):
                raise ValueError(f"{key}={value!r}: {'a name' if str in kinds else 'True or False'}")
        if self.hosts is not None and (
            not isinstance(self.hosts, int) or isinstance(self.hosts, bool) or self.hosts < 1
        ):
            raise ValueError(f"hosts={self.hosts!r}: a whole number from 1")
        if self.hosts is not None and self.hosts > min(self.sizes):
            raise ValueError(f"hosts={self.hosts}: a world of {min(self.sizes)} can't be on so many hosts")
        if not isinstance(self.keeps, str):
            raise ValueError(f"keeps={self.keeps!r}: the reason, in words")
        for name, value in self.env:
            if not isinstance(name, str) or not isinstance(value, str):
                raise ValueError(f"env: {name!r}: {value!r}: names and values must be strings")
        for name in self.imports:
            if not isinstance(name, str):
                raise ValueError(f"imports: {name!r}: the name of a module")


@dataclass(frozen=True)
class WorldRequest:
    """One size of a mark: the parameter of the ``world`` fixture."""

    size: int
    mark: WorldMark = field(default_factory=WorldMark)
    several: bool = False
    """Whether the test has worlds of all sizes of its mark, of which ``size`` is the largest."""

    def __repr__(self) -> str:  # as --setup-show prints it
        return f"{self.size} rank{'s' if self.size > 1 else ''}"


def read_marks(marks: Iterable[pytest.Mark], where: str) -> WorldMark:
    """Combine the marks on a test, closest first. A closer mark wins, argument by argument.

    Errors: UsageError that names the test and the argument.
    """
    sizes: tuple[Any, ...] | None = None
    options: dict[str, Any] = {}
    for mark in marks:
        if not mark.args and not mark.kwargs:
            raise pytest.UsageError(f"{where}: no world size given: write for example @pytest.mark.world(2)")
        if mark.args and sizes is None:
            sizes = mark.args
        for key, value in mark.kwargs.items():
            options.setdefault(key, value)
    known = {field.name for field in dataclasses.fields(WorldMark)} - {"sizes"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise pytest.UsageError(
            f"{where}: @pytest.mark.world has no argument {unknown[0]!r}; it has {', '.join(sorted(known))}"
        )
    try:
        if "env" in options:
            options["env"] = _pairs(options["env"])
        if "imports" in options:
            options["imports"] = _names(options["imports"])
        return WorldMark(sizes=tuple(sizes) if sizes is not None else DEFAULT_SIZES, **options)
    except (TypeError, ValueError) as e:
        raise pytest.UsageError(f"{where}: @pytest.mark.world: {e}") from e


def _pairs(env: Any) -> tuple[tuple[Any, Any], ...]:
    if not isinstance(env, Mapping):
        raise ValueError(f"env={env!r}: a dict of names and values of environment variables")
    return tuple(sorted(env.items(), key=lambda pair: str(pair[0])))


def _names(imports: Any) -> tuple[Any, ...]:
    if not isinstance(imports, list | tuple):
        raise ValueError(f"imports={imports!r}: a list of names of modules")
    return tuple(imports)


def spmd(*sizes: Any, **options: Any) -> Any:
    """Run a whole test body on each rank: ``def test_x(rank): ...``.

    Use ``@spmd`` alone, or with the arguments of ``@pytest.mark.world``: ``@spmd(2, 3, timeout=10)``. The test's other
    parameters are fixtures and parameters as usual. They are sent to the ranks, so they must be picklable.
    """
    if len(sizes) == 1 and not options and callable(sizes[0]):
        return _spmd(sizes[0])

    def decorate(body: Callable[..., Any]) -> Any:
        test = _spmd(body)
        return pytest.mark.world(*sizes, **options)(test) if sizes or options else test

    return decorate


def _spmd(body: Callable[..., Any]) -> Callable[..., None]:
    parameters = list(inspect.signature(body).parameters.values())
    names = [parameter.name for parameter in parameters]
    own = 1 if names[:1] == ["self"] else 0
    if names[own : own + 1] != ["rank"]:
        after = ", after self" if own else ""
        raise TypeError(f"@spmd: the first parameter of {body.__qualname__} must be called rank{after}")
    names[own] = "world"

    @functools.wraps(body)
    def test(*positional: Any, **named: Any) -> None:
        __tracebackhide__ = True
        # pytest passes everything by name, Hypothesis by position.
        arguments = {**dict(zip(names, positional, strict=False)), **named}
        world = arguments.pop("world")
        world.run(_bound(body, arguments.pop("self")) if own else body, **arguments)

    # pytest and Hypothesis read what the test needs from its signature.
    keyword = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters[own] = keyword
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    del test.__wrapped__
    return test


def _bound(body: Callable[..., Any], instance: Any) -> Callable[..., Any]:
    """Return a method that can be pickled. A bound one is pickled by its name, which is that of the test around it."""
    bound: Any = functools.partial(body, instance)
    bound.__qualname__, bound.__module__ = body.__qualname__, body.__module__
    return bound  # type: ignore[no-any-return]
