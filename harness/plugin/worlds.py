"""The ``world`` fixture: which world a test gets, on which devices, and what is made of its failure."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, cast

import pytest

from harness import entry_points
from harness.entry_points import BACKENDS, DEVICES
from harness.plugin import numprocesses, options, perf
from harness.plugin.claims import needs_of
from harness.plugin.marks import MEASURED, WorldRequest, read_marks
from harness.plugin.profiles import Profiles
from harness.plugin.slots import Slots
from harness.profiles.obeyed import Obeyed, obeying
from harness.profiles.obeyed import of as obeyed_of
from harness.redaction import remember
from harness.requirements import stack_of
from harness.safe_io.shown import printable
from harness.subjects import TORCH
from harness.thorough import rounds

if TYPE_CHECKING:
    from harness.devices import Inventory
    from harness.profiles import Profile
    from harness.worlds.pool import Pool
    from harness.worlds.postmortem import RanksFailed
    from harness.worlds.world import World, WorldSpec

FIXTURE, SEVERAL = "world", "worlds"


class ResidueWarning(pytest.PytestWarning):
    """A test left something in a rank that another test could have noticed."""


class ServerWarning(pytest.PytestWarning):
    """What ranks are forked from was lost, and there is another one now."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each world size, or one test of all of them."""
    if FIXTURE in metafunc.fixturenames or SEVERAL in metafunc.fixturenames:
        wrong = ""
        try:
            mark = read_marks(metafunc.definition.iter_markers("world"), metafunc.definition.nodeid)
        except pytest.UsageError as e:
            wrong = str(e)
        if wrong:  # while collecting, pytest would show a usage error with pytest's own stack
            pytest.fail(wrong, pytrace=False)
        if SEVERAL in metafunc.fixturenames:
            metafunc.parametrize(SEVERAL, [WorldRequest(max(mark.sizes), mark)], indirect=True, ids=["worlds"])
            return
        requests = [WorldRequest(size, mark) for size in mark.sizes]
        ids = [f"{size}rank{'s' if size > 1 else ''}" for size in mark.sizes]
        metafunc.parametrize(FIXTURE, requests, indirect=True, ids=ids)


def request_of(item: pytest.Item) -> WorldRequest | None:
    """What an item asks of its world, or None if it has none."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec is not None else {}
    found = params.get(FIXTURE) or params.get(SEVERAL)
    return found if isinstance(found, WorldRequest) else None


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world of ranks, of the size and kind that the test's ``world`` mark says (two ranks without one).

    Fresh ranks for every test, where the device allows it; see :meth:`harness.worlds.world.World.run`.
    """
    with plugin_of(request.config).world_for(request.node, request.param) as found:
        yield found


@pytest.fixture(name=SEVERAL)
def several_worlds(request: pytest.FixtureRequest) -> Iterator[SeveralWorlds]:
    """``worlds(n)`` is a world of n ranks; n is one of the sizes that the test's ``world`` mark gives.

    For properties that draw the number of ranks: a world lives until the test ends, or its ranks fail.
    """
    with plugin_of(request.config).worlds_for(request.node, request.param) as found:
        yield found


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    plugin_of(item.config).start_ahead(item, nextitem)


pytest_runtest_teardown = pytest.hookimpl(tryfirst=True)(pytest_runtest_teardown)


def plugin_of(config: pytest.Config) -> Worlds:
    """What the plug-in knows of worlds in this process."""
    found = config.pluginmanager.get_plugin("concord-worlds")
    assert isinstance(found, Worlds)
    return found


class Worlds:
    """What the plug-in knows of worlds in one pytest process."""

    def __init__(self, config: pytest.Config, profiles: Profiles, slots: Slots) -> None:
        self.config = config
        self.profiles = profiles
        self.slots = slots
        self._pool: Pool | None = None
        self._inventories: dict[str | None, Inventory] = {}
        self.first: tuple[tuple[str, str], ...] = tuple(
            ("harness.faults:put", name) for name in config.getoption("fault")
        )
        """What every rank calls before anything else, once the subject is in its place."""
        self.subject = options.subject(config)

    @property
    def pool(self) -> Pool:
        """The pool; made when it is first needed."""
        if self._pool is None:
            from harness.worlds.places import show_from
            from harness.worlds.pool import Pool
            from harness.worlds.terminal import Terminal

            show_from(str(self.config.invocation_params.dir), str(self.config.rootpath))
            captures = self.config.getoption("capture") != "no"
            self._pool = Pool(terminal=Terminal(immediately=not captures, release=self._uncaptured))
        return self._pool

    @contextlib.contextmanager
    def _uncaptured(self) -> Iterator[None]:
        """Standard input and output as pytest found them."""
        manager = self.config.pluginmanager.getplugin("capturemanager")
        self.config.hook.pytest_enter_pdb(config=self.config, pdb=None)
        if manager is not None:
            manager.suspend(in_=True)
        try:
            yield
        finally:
            if manager is not None:
                manager.resume()
            self.config.hook.pytest_leave_pdb(config=self.config, pdb=None)

    # which world

    def spec_of(self, asked: WorldRequest) -> tuple[WorldSpec, Inventory]:
        """The world that a request means under this run's options."""
        from harness.devices import backend_for
        from harness.worlds.world import WorldSpec

        option = self.config.getoption
        mark = asked.mark
        profile = self.profiles.chosen()
        inventory = self.inventory(mark.device or option("world_device") or (profile.device if profile else None))
        kind = inventory.kind
        by_profile = profile.backend if profile is not None and profile.device == kind else None
        backend = mark.backend or option("world_backend") or by_profile or backend_for(kind)
        claims = self.claims(backend, kind)
        warm = mark.warm if mark.warm is not None else claims.warm if claims is not None else None
        style = option("tbstyle", "auto")
        if mark.env:
            remember(dict(mark.env))
        spec = WorldSpec(
            size=asked.size,
            backend=backend,
            device=kind,
            warm=warm if warm is not None else not inventory.on_host,
            timeout=mark.timeout or option("world_timeout") or (claims and claims.timeout) or 60.0,
            env=tuple(sorted({**dict(claims.env if claims else ()), **dict(mark.env)}.items())),
            imports=tuple(
                dict.fromkeys((*(claims.imports if claims else ()), *_brought_by(backend, kind), *mark.imports))
            ),
            subject=self.subject.name,
            first=(*self.subject.first, *self.first),
            record=mark.record,
            network=mark.network or option("rank_network"),
            exclusive=mark.exclusive is True or (mark.exclusive == MEASURED and perf.asked_for(self.config)),
            debug_rank=option("rank_pdb"),
            traceback_style="short" if style in ("auto", "line", "no") else style,
            show_locals=bool(option("showlocals", False)),
            verbosity=max(0, option("verbose", 0)),
        )
        return spec, inventory

    def claims(self, backend: str, kind: str) -> Profile | None:
        """The run's profile, if it is about worlds of this backend on this type of device."""
        profile = self.profiles.chosen()
        return profile if profile is not None and profile.is_about(backend, kind) else None

    def obeyed(self, spec: WorldSpec) -> Obeyed:
        """What a test in such a world has to obey."""
        return obeyed_of(self.claims(spec.backend, spec.device), self.profiles.platform())

    def unclaimed(self, item: pytest.Item, obeyed: Obeyed, inventory: Inventory) -> str:
        """Why the profile, or the kind of device, keeps a test from running; empty if neither does."""
        needs = needs_of(item)
        if inventory.on_host and (what := needs.of_accelerators):
            return f"{what}: the host has none"
        what = needs.unclaimed(obeyed.claims)
        return obeyed.why_not(what) if what and obeyed.profile else ""

    def ranks_per_device(self, spec: WorldSpec) -> int:
        """How many ranks of a world share an accelerator."""
        claims = self.claims(spec.backend, spec.device)
        asked: int | None = self.config.getoption("ranks_per_device")
        return asked or (claims.ranks_per_device if claims is not None else 1)

    def inventory(self, kind: str | None) -> Inventory:
        """The devices of a kind, looked up once."""
        from harness import devices

        if kind not in self._inventories:
            profile = self.profiles.settled
            ours = profile if profile is not None and profile.device == kind else None
            imports = (*(ours.imports if ours else ()), *(entry_points.modules_for(DEVICES, kind) if kind else ()))
            mask = ours.visible_devices if ours else ""
            self._inventories[kind] = devices.inventory(kind, imports=imports, mask=mask)
        return self._inventories[kind]

    def unsupported(self, spec: WorldSpec, inventory: Inventory) -> str:
        """Why this run can't have such a world; empty if it can.  Decided before any rank starts."""
        import torch.distributed as dist

        if not spec.imports and not dist.is_backend_available(spec.backend):
            return f"torch has no backend {spec.backend!r} here"
        claims = self.claims(spec.backend, spec.device)
        if claims is not None and claims.world_sizes and spec.size not in claims.world_sizes:
            claimed = ", ".join(map(str, claims.world_sizes))
            return f"profile {claims.name} claims worlds of {claimed} ranks, not of {spec.size}"
        need = inventory.demand(spec.size, self.ranks_per_device(spec))
        have = len(inventory.devices)
        if need > have:
            return f"a world of {spec.size} ranks needs {need} {inventory.kind} devices, and there are {have}"
        return ""

    @contextlib.contextmanager
    def leased(self, item: pytest.Item, asked: WorldRequest) -> Iterator[tuple[WorldSpec, tuple[str, ...]]]:
        """What world a test means, and its devices, leased for as long."""
        from harness.devices import DeviceError, dealt

        try:
            spec, inventory = self.spec_of(asked)
        except DeviceError as e:
            pytest.skip(f"unsupported: {e}")
        note(item, "world", str(spec))
        obeyed = self.obeyed(spec)
        why = self.subject.lacks(stack_of(item.nodeid)) or self.unsupported(spec, inventory)
        why = why or self.unclaimed(item, obeyed, inventory)
        if why:
            pytest.skip(f"unsupported: {why}")
        per_device = self.ranks_per_device(spec)
        count = len(inventory.devices) if spec.exclusive else inventory.demand(spec.size, per_device)
        with self.slots.leased(item, inventory, count) as leased, obeying(obeyed):
            yield spec, () if inventory.on_host else dealt(leased, spec.size, per_device, whole=spec.exclusive)

    @contextlib.contextmanager
    def world_for(self, item: pytest.Item, asked: WorldRequest) -> Iterator[World]:
        """The world of one test."""
        with self.leased(item, asked) as (spec, devices):
            found = self.pool.acquire(spec, devices)
            self._tell_replaced(item)
            try:
                yield found
            except BaseException:
                found.kill()
                raise
            left = self.pool.release(found, devices)
        for sentence in left:
            item.warn(ResidueWarning(f"{sentence}; this world is not used again"))

    def _tell_replaced(self, item: pytest.Item) -> None:
        """Warn of servers that were lost before or in this test's set-up."""
        for what in self.pool.replaced:
            item.warn(ServerWarning(f"{what}; later ranks are forked from a new one"))
        self.pool.replaced.clear()

    @property
    def networks(self) -> str:
        """Which networks ranks were on, in words; empty if there were no ranks."""
        return "; ".join(sorted(self._pool.networks)) if self._pool is not None else ""

    @contextlib.contextmanager
    def worlds_for(self, item: pytest.Item, asked: WorldRequest) -> Iterator[SeveralWorlds]:
        """The worlds of one test, made as it asks for them."""
        with self.leased(item, asked) as (spec, devices):
            found = SeveralWorlds(self.pool, spec, devices, asked.mark.sizes)
            try:
                yield found
            except BaseException:
                found.kill()
                raise
            left = found.release()
        for sentence in left:
            item.warn(ResidueWarning(f"{sentence}; this world is not used again"))

    def start_ahead(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Start the next test's world while this one's ranks take their leave: they mostly sleep meanwhile."""
        asked = request_of(nextitem) if nextitem is not None else None
        if asked is None or request_of(item) is None or any(nextitem.iter_markers("skip")):  # type: ignore[union-attr]
            return
        if self.subject.lacks(stack_of(nextitem.nodeid)):  # type: ignore[union-attr]
            return
        try:
            spec, inventory = self.spec_of(asked)
            if self.unsupported(spec, inventory) or self.unclaimed(nextitem, self.obeyed(spec), inventory):  # type: ignore[arg-type]
                return
            if inventory.on_host and not spec.warm and not spec.exclusive:
                self.pool.begin(spec)
        except Exception:
            pass  # whatever it is, the next test's own set-up meets it again and says so

    # hooks

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Start the server early, put the largest worlds first for xdist, fit Hypothesis to the fixture."""
        with_worlds = [item for item in items if request_of(item) is not None]
        if not with_worlds:
            return
        _ship_test_code()
        for item in with_worlds:
            _fit_hypothesis(item)
        if self.config.getoption("numprocesses", None) or hasattr(self.config, "workerinput"):
            from harness.devices import largest_first

            sizes = [asked.size if (asked := request_of(item)) else 0 for item in items]
            items[:] = [items[i] for i in largest_first(sizes)]
        running_here = not self.config.getoption("numprocesses", None) and not self.config.option.collectonly
        if running_here:
            self.pool.prepare(self.config.getoption("rank_network"))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse to debug a rank that no world has."""
        rank: int | None = self.config.getoption("rank_pdb")
        sizes = [asked.size for item in session.items if (asked := request_of(item))]
        if rank is not None and sizes and rank >= max(sizes):
            largest = max(sizes)
            ranks = "rank 0 only" if largest == 1 else f"ranks 0 to {largest - 1}"
            raise pytest.UsageError(f"--rank-pdb {rank}: the largest world of these tests has {ranks}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """A test whose ranks never ran anything has tested nothing."""
        _separate_databases(item)
        yield
        funcargs = getattr(item, "funcargs", {})
        found = funcargs.get(FIXTURE) or funcargs.get(SEVERAL)
        passed_over = item.stash.get(rounds.PASSED_OVER, False)
        if request_of(item) is not None and found is not None and found.runs == 0 and not passed_over:
            pytest.fail("no rank ran anything: the test has a world and never called world.run", pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Give a report the evidence of its ranks instead of the harness's own stack."""
        report = yield
        error = ranks_failed(call.excinfo.value) if call.excinfo is not None else None
        if error is not None and call.excinfo is not None:
            if call.excinfo.value is error:
                report.longrepr = shown(error, call.excinfo, item.config)
            _attach(item, report, error)
        elif call.excinfo is not None and request_of(item) is not None and timed_out(call.excinfo.value):
            note(item, "verdict", "hung")
            report.user_properties.append(("concord.verdict", "hung"))
        return report

    @pytest.hookimpl(trylast=True)  # pytest itself tears down what an interrupted test has: its worlds
    def pytest_sessionfinish(self) -> None:
        self.close()

    def pytest_unconfigure(self) -> None:
        self.close()

    def close(self) -> None:
        """End every world."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def pytest_report_header(self) -> list[str]:
        name, devices = self.subject.name, self._devices()
        lines = [] if name == TORCH else [f"concord: subject {name}, in the place of torch's stacks"]
        return [*lines, *([devices] if devices else [])]

    def _devices(self) -> str | None:
        profile = self.profiles.explicit
        option = self.config.getoption("world_device")
        kind = option or (profile.device if profile is not None else None)
        if not numprocesses.asked_for_gpus and not kind:
            return None  # looking for devices imports torch, and this may be a session that has nothing to do with it
        from harness.devices import DeviceError

        try:
            inventory = self.inventory(kind)
        except DeviceError as e:
            raise pytest.UsageError(f"{'--world-device' if option else '--profile'}: {e}") from e
        count = len(inventory.devices)
        if inventory.on_host:
            return f"concord: no accelerator in use: ranks on cpu, {count} worlds side by side (one for each core)"
        return f"concord: {count} {inventory.kind} devices: {', '.join(inventory.keys)}"


class SeveralWorlds:
    """Worlds of several sizes, on the devices of the largest.

    ``sizes``: those that can be asked for.
    """

    def __init__(self, pool: Pool, spec: WorldSpec, devices: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self._pool, self._spec, self._devices = pool, spec, devices
        self._live: dict[int, World] = {}

    def __call__(self, size: int) -> World:
        """The world of a size.  Errors: ValueError for a size that the test's mark does not have."""
        if size not in self.sizes:
            raise ValueError(f"no world of {size} ranks: the sizes in the test's world mark are {self.sizes}")
        if size not in self._live:
            spec = dataclasses.replace(self._spec, size=size)
            self._live[size] = self._pool.acquire(spec, self._devices[:size])
        return self._live[size]

    @property
    def runs(self) -> int:
        """How often ranks ran anything."""
        return sum(world.runs for world in self._live.values())

    def kill(self) -> None:
        """End them all, at once."""
        for world in self._live.values():
            world.kill()
        self._live.clear()

    def release(self) -> list[str]:
        """Give them all back; returns what was found in them that another test could have noticed."""
        left = []
        try:
            for world in self._live.values():
                left += self._pool.release(world, self._devices[: world.size])
        except BaseException:
            self.kill()
            raise
        self._live.clear()
        return left


def _brought_by(backend: str, kind: str) -> tuple[str, ...]:
    """The modules that packages say register a backend and a type of device."""
    return (*entry_points.modules_for(DEVICES, kind), *entry_points.modules_for(BACKENDS, backend))


def _ship_test_code() -> None:
    """Ship functions of test modules, conftests and what else pytest rewrites by value.

    A rank need not be able to import them, and keeps the assertions that pytest has rewritten.
    """
    import sys

    import cloudpickle
    from _pytest.assertion.rewrite import AssertionRewritingHook

    from harness.worlds.shipping import is_test_code

    for module in list(sys.modules.values()):
        if isinstance(getattr(module, "__loader__", None), AssertionRewritingHook) and is_test_code(module):
            cloudpickle.register_pickle_by_value(module)


def _fit_hypothesis(item: pytest.Item) -> None:
    """A world outlives the examples of a property on purpose, and an example may take as long as ranks need."""
    function: Any = getattr(item, "obj", None)
    function = getattr(function, "__func__", function)
    if not getattr(function, "is_hypothesis_test", False):
        return
    from hypothesis import HealthCheck, Phase, settings

    before: Any = getattr(function, "_hypothesis_internal_use_settings", settings.default)
    checks = {*before.suppress_health_check, HealthCheck.function_scoped_fixture, HealthCheck.differing_executors}
    deadline = None if before.deadline == settings.get_profile("default").deadline else before.deadline
    function._hypothesis_internal_use_settings = settings(
        parent=before,
        suppress_health_check=list(checks),
        deadline=deadline,
        # It would name lines of the harness: those of the test run in another process.
        phases=[phase for phase in before.phases if phase is not Phase.explain],
    )


def _separate_databases(item: pytest.Item) -> None:
    """Examples that fail at one world size are no examples for another."""
    handle = getattr(getattr(item, "obj", None), "hypothesis", None)
    inner = getattr(handle, "inner_test", None)
    if inner is not None and request_of(item) is not None:
        inner._hypothesis_internal_add_digest = item.nodeid.encode()


def ranks_failed(error: BaseException | None) -> RanksFailed | None:
    """The failure of ranks in an exception or in the group that Hypothesis makes of several."""
    import sys

    postmortem: Any = sys.modules.get("harness.worlds.postmortem")
    if postmortem is None or error is None:
        return None
    if isinstance(error, postmortem.RanksFailed):
        return cast("RanksFailed", error)
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            found = ranks_failed(inner)
            if found is not None:
                return found
    return None


def shown(error: RanksFailed, excinfo: pytest.ExceptionInfo[BaseException], config: pytest.Config) -> Any:
    """A failure of ranks as pytest shows failures: where the test ran something on ranks, then who failed first."""
    from _pytest._code.code import ExceptionChainRepr, ReprEntry, ReprFileLocation, ReprTraceback

    lines = []
    for entry in excinfo.traceback:
        path = str(entry.path)
        if path.startswith(_HARNESS) or entry.ishidden(excinfo) or "site-packages" in path:
            continue
        lines.append(f"{_relative(path, config)}:{entry.lineno + 1}: in {entry.name}")
        lines.append(f"    {str(entry.statement).strip()}")
    first, *rest = error.summary().split("\n")
    lines += [f"E   {first}", *(f"E   {line}" for line in rest)]
    for text in getattr(error, "__notes__", ()):  # Hypothesis: the smallest example
        lines += [f"E   {line}" for line in text.split("\n")]
    file, line = error.place or ("", 0)
    crash = ReprFileLocation(printable(_relative(file, config)), line, error.headline)
    lines = [printable(text) for text in lines]
    traceback = ReprTraceback([ReprEntry(lines, None, None, None, "short")], None, "short")
    return ExceptionChainRepr([(traceback, crash, None)])


def _relative(path: str, config: pytest.Config) -> str:
    root = f"{config.invocation_params.dir}{os.sep}"
    return path.removeprefix(root)


_HARNESS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def _attach(item: pytest.Item, report: Any, error: RanksFailed) -> None:
    from harness.worlds.terminal import prefixed

    add = getattr(report.longrepr, "addsection", None)
    if add is not None:
        for title, text in error.sections():
            add(title, text)
    for end in error.ends:
        if end.output.strip():
            report.sections.append((f"Captured stdout {report.when} (rank {end.index})", end.output))
            # For whoever reads the reports of later phases, as JUnit XML does.
            lines = end.output.rstrip("\n").split("\n")
            item.add_report_section(report.when, "stdout", "".join(f"{prefixed(end.index, x)}\n" for x in lines))
    for key, value in (
        ("verdict", error.verdict),
        ("first_rank", str(error.culprits[0]) if error.culprits else ""),
        ("headline", error.headline),
    ):
        note(item, key, value)
        report.user_properties.append((f"concord.{key}", value))
    report.concord_ranks = evidence_of(error)


def timed_out(error: BaseException) -> bool:
    """Whether pytest-timeout ended a test, by its signal."""
    return type(error).__name__ == "Failed" and str(error).startswith("Timeout (")


def evidence_of(error: RanksFailed) -> list[dict[str, Any]]:
    """What each rank said, as plain data for results and for pytest-xdist's wire."""
    return [
        {
            "rank": end.index,
            "kind": end.kind,
            "what": end.what,
            "first": end is error.first,
            "text": str((end.report or {}).get("text", "")),
            "stack": end.stack,
            "collectives": list(end.collectives),
            "output": end.output[-20_000:],
        }
        for end in error.ends
    ]


def note(item: pytest.Item, key: str, value: str) -> None:
    """Put a property on the test: it goes into JUnit XML and into the results."""
    item.user_properties.append((f"concord.{key}", value))
