"""The ``world`` fixture: which world a test gets, on which devices, and how its failure is reported."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from harness.plugin import numprocesses
from harness.plugin.functions import fit_hypothesis, separate_databases, ship_test_code
from harness.plugin.launching import Launching
from harness.plugin.marks import WorldRequest, read_marks
from harness.plugin.profiles import Profiles
from harness.plugin.rank_reports import attach, note, ranks_failed, shown, timed_out
from harness.plugin.several import Dealing, SeveralWorlds
from harness.plugin.slots import Slots
from harness.plugin.specs import Specs
from harness.profiles.obeyed import obeying
from harness.profiles.vocabulary import FORK
from harness.requirements import stack_of
from harness.results import GivenWorld, NoDevice, unsupported
from harness.subjects import TORCH
from harness.thorough import rounds

if TYPE_CHECKING:
    from harness.worlds.pool import Pool
    from harness.worlds.world import World, WorldSpec

FIXTURE, SEVERAL = "world", "worlds"
_GIVEN = pytest.StashKey[GivenWorld]()


class ResidueWarning(pytest.PytestWarning):
    """A test left something in a rank that another test could have noticed."""


class ServerWarning(pytest.PytestWarning):
    """The server from which ranks are forked was lost and replaced."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test for each world size, or one test with all of them."""
    if FIXTURE in metafunc.fixturenames or SEVERAL in metafunc.fixturenames:
        wrong = ""
        try:
            mark = read_marks(metafunc.definition.iter_markers("world"), metafunc.definition.nodeid)
        except pytest.UsageError as e:
            wrong = str(e)
        if wrong:  # during collection, pytest would show a usage error with pytest's own traceback
            pytest.fail(wrong, pytrace=False)
        if SEVERAL in metafunc.fixturenames:
            metafunc.parametrize(
                SEVERAL, [WorldRequest(max(mark.sizes), mark, several=True)], indirect=True, ids=["worlds"]
            )
            return
        requests = [WorldRequest(size, mark) for size in mark.sizes]
        ids = [f"{size}rank{'s' if size > 1 else ''}" for size in mark.sizes]
        metafunc.parametrize(FIXTURE, requests, indirect=True, ids=ids)


def request_of(item: pytest.Item) -> WorldRequest | None:
    """Return what an item asks of its world, or None if it has none."""
    callspec = getattr(item, "callspec", None)
    params = callspec.params if callspec is not None else {}
    asked = params.get(FIXTURE) or params.get(SEVERAL)
    return asked if isinstance(asked, WorldRequest) else None


def given_to(item: pytest.Item) -> GivenWorld | None:
    """Return the world that a test was given in its setup, or None if it has none."""
    return item.stash.get(_GIVEN, None)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A world of ranks, of the size and kind in the test's ``world`` mark (two ranks without one).

    Every test gets fresh ranks, where the device allows it; see :meth:`harness.worlds.world.World.run`.
    """
    with plugin_of(request.config).world_for(request.node, request.param) as found:
        yield found


@pytest.fixture(name=SEVERAL)
def several_worlds(request: pytest.FixtureRequest) -> Iterator[SeveralWorlds]:
    """``worlds(n)`` is a world of n ranks, where n is one of the sizes in the test's ``world`` mark.

    For properties that draw the number of ranks: a world lives until the test ends, or its ranks fail.
    """
    with plugin_of(request.config).worlds_for(request.node, request.param) as found:
        yield found


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    plugin_of(item.config).start_ahead(item, nextitem)


pytest_runtest_teardown = pytest.hookimpl(tryfirst=True)(pytest_runtest_teardown)


def plugin_of(config: pytest.Config) -> Worlds:
    """Return the state of worlds in this process."""
    plugin = config.pluginmanager.get_plugin("concord-worlds")
    assert isinstance(plugin, Worlds)
    return plugin


class Worlds:
    """The state of worlds in one pytest process."""

    def __init__(self, config: pytest.Config, profiles: Profiles, slots: Slots, launching: Launching) -> None:
        self.config = config
        self.profiles = profiles
        self.slots = slots
        self._launching = launching
        self._pool: Pool | None = None
        faults = config.getoption("fault")
        first = tuple(("harness.faults:put", name) for name in faults)
        self.specs = Specs(config, profiles, first, self._launching)
        """Decides which world each test gets."""
        self.subject = self.specs.subject

    @property
    def pool(self) -> Pool:
        """The pool, created when it is first needed."""
        if self._pool is None:
            from harness.worlds.places import show_from
            from harness.worlds.pool import MOST_ON_A_DEVICE, Pool
            from harness.worlds.terminal import Terminal

            show_from(str(self.config.invocation_params.dir), str(self.config.rootpath))
            captures = self.config.getoption("capture") != "no"
            terminal = Terminal(immediately=not captures, release=self._uncaptured)
            ranks = self.config.getoption("ranks_per_device") or 1
            sharing = numprocesses.worlds_per_device(self.config)
            waiting = max(MOST_ON_A_DEVICE, 2 * ranks) if sharing == 1 else ranks
            self._pool = Pool(launcher=self._launching.launcher, terminal=terminal, most_on_a_device=waiting)
        return self._pool

    @contextlib.contextmanager
    def _uncaptured(self) -> Iterator[None]:
        """Restore standard input and output as pytest found them."""
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

    @contextlib.contextmanager
    def leased(self, item: pytest.Item, asked: WorldRequest) -> Iterator[tuple[WorldSpec, Dealing, tuple[int, ...]]]:
        """Lease the devices of a test's world.

        Yields its specification, its devices, and the sizes that a test with several worlds can have.
        """
        from harness.devices import NoDeviceError

        try:
            spec, inventory = self.specs.spec_of(asked, item)
        except NoDeviceError as e:
            unsupported(NoDevice(e.kind, e.why))
        sizes = self.specs.fitting(asked, spec, inventory) if asked.several else ()
        if asked.several:
            spec = self.specs.sized(asked, spec, max(sizes, default=min(asked.mark.sizes)), inventory)
        item.stash[_GIVEN] = GivenWorld(spec.size, spec.backend, spec.device, tuple(sorted(sizes)), spec.hosts)
        note(item, "world", str(item.stash[_GIVEN]))
        obeyed = dataclasses.replace(self.specs.obeyed(spec), sizes=sizes or None)
        cause = self.subject.lacks(stack_of(item.nodeid)) or self.specs.unsupported(spec, inventory)
        cause = cause or self.specs.unclaimed(item, obeyed, inventory)
        if cause is not None:
            unsupported(cause)
        prefer = self._pool.devices_of(spec) if self._pool is not None else ()
        with self.slots.leased(item, inventory, self.specs.need(spec), prefer) as leased, obeying(obeyed):
            yield spec, Dealing(self.specs, asked, inventory, leased), sizes

    @contextlib.contextmanager
    def world_for(self, item: pytest.Item, asked: WorldRequest) -> Iterator[World]:
        """Yield the world of one test."""
        with self.leased(item, asked) as (spec, dealing, _):
            devices = dealing.devices(spec)
            world = self.pool.acquire(spec, devices)
            self._tell_replaced(item)
            try:
                yield world
            except BaseException:
                world.kill()
                raise
            left = self.pool.release(world, devices)
        for sentence in left:
            item.warn(ResidueWarning(f"{sentence}; this world is not used again"))

    def _tell_replaced(self, item: pytest.Item) -> None:
        """Warn of servers that were lost before or during this test's setup."""
        for what in self.pool.replaced:
            item.warn(ServerWarning(f"{what}; later ranks are forked from a new one"))
        self.pool.replaced.clear()

    @property
    def agents(self) -> str:
        """How many agents start ranks, and on how many machines; empty if ranks start on this host alone."""
        return self._launching.agents

    @property
    def accelerators_of_agents(self) -> dict[str, str]:
        """What results say about the accelerators of agents' hosts, named as those of this machine would be."""
        return self._launching.accelerators

    @property
    def networks(self) -> str:
        """The networks that ranks were on, in words; empty if there were no ranks."""
        return "; ".join(sorted(self._pool.networks)) if self._pool is not None else ""

    @property
    def interfaces(self) -> str:
        """The network interface by which ranks of each host reached others; empty if no world had several hosts."""
        return "; ".join(self._pool.interfaces) if self._pool is not None else ""

    @contextlib.contextmanager
    def worlds_for(self, item: pytest.Item, asked: WorldRequest) -> Iterator[SeveralWorlds]:
        """Yield the worlds of one test, created as it asks for them."""
        with self.leased(item, asked) as (spec, dealing, sizes):
            worlds = SeveralWorlds(self.pool, spec, dealing, sizes)
            try:
                yield worlds
            except BaseException:
                worlds.kill()
                raise
            left = worlds.release()
        for sentence in left:
            item.warn(ResidueWarning(f"{sentence}; this world is not used again"))

    def start_ahead(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Start the next test's world while this one's ranks shut down: they mostly sleep meanwhile."""
        asked = request_of(nextitem) if nextitem is not None else None
        if asked is None or request_of(item) is None or any(nextitem.iter_markers("skip")):  # type: ignore[union-attr]
            return
        if self.subject.lacks(stack_of(nextitem.nodeid)):  # type: ignore[union-attr]
            return
        try:
            spec, inventory = self.specs.spec_of(asked, nextitem)  # type: ignore[arg-type]
            obeyed = self.specs.obeyed(spec)
            if self.specs.unsupported(spec, inventory) or self.specs.unclaimed(nextitem, obeyed, inventory):  # type: ignore[arg-type]
                return
            if inventory.on_host and not spec.warm and not spec.exclusive:
                self.pool.begin(spec)
        except Exception:
            pass  # the next test's own setup fails in the same way, and reports it

    # hooks

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """Require that a test that has passed has left nothing in its ranks."""
        __tracebackhide__ = True
        result = yield
        world: Any = pyfuncitem.funcargs.get(FIXTURE)
        if request_of(pyfuncitem) is not None and world is not None:
            world.require_nothing_left()
        return result

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Start the server early, put the largest worlds first for xdist, fit Hypothesis to the fixture."""
        with_worlds = [item for item in items if request_of(item) is not None]
        if not with_worlds:
            return
        ship_test_code()
        for item in with_worlds:
            fit_hypothesis(item)
        if self.config.getoption("numprocesses", None) or hasattr(self.config, "workerinput"):
            from harness.devices import largest_first

            sizes = [asked.size if (asked := request_of(item)) else 0 for item in items]
            items[:] = [items[i] for i in largest_first(sizes)]
        running_here = not self.config.getoption("numprocesses", None) and not self.config.option.collectonly
        if running_here:
            self.pool.prepare(self.config.getoption("rank_network"), self.config.getoption("rank_start") or FORK)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Reject ``--rank-pdb`` for a rank that no world has; keep what was imported out of garbage collections."""
        rank: int | None = self.config.getoption("rank_pdb")
        sizes = [asked.size for item in session.items if (asked := request_of(item))]
        if rank is not None and sizes and rank >= max(sizes):
            largest = max(sizes)
            ranks = "rank 0 only" if largest == 1 else f"ranks 0 to {largest - 1}"
            raise pytest.UsageError(f"--rank-pdb {rank}: the largest world of these tests has {ranks}")
        if sizes and not self.config.getoption("numprocesses", None):
            gc.collect()
            gc.freeze()  # torch and the tests stay, and looking at them again took a quarter of this process's time

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Fail a test whose ranks never ran anything, because it has tested nothing."""
        if request_of(item) is not None:
            separate_databases(item)
        yield
        funcargs = getattr(item, "funcargs", {})
        worlds = funcargs.get(FIXTURE) or funcargs.get(SEVERAL)
        passed_over = item.stash.get(rounds.PASSED_OVER, False)
        if request_of(item) is not None and worlds is not None and worlds.runs == 0 and not passed_over:
            pytest.fail("no rank ran anything: the test has a world and never called world.run", pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Give a report the evidence of its ranks instead of the harness's own stack."""
        report = yield
        error = ranks_failed(call.excinfo.value) if call.excinfo is not None else None
        if error is not None and call.excinfo is not None:
            if call.excinfo.value is error:
                report.longrepr = shown(error, call.excinfo, item.config)
            attach(item, report, error)
        elif call.excinfo is not None and request_of(item) is not None and timed_out(call.excinfo.value):
            note(item, "verdict", "hung")
            report.user_properties.append(("concord.verdict", "hung"))
        return report

    @pytest.hookimpl(trylast=True)  # pytest itself tears down the worlds of an interrupted test first
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
            return None  # looking for devices imports torch, which this session may not need at all
        from harness.devices import DeviceError

        try:
            inventory = self.specs.inventory(kind)
        except DeviceError as e:
            raise pytest.UsageError(f"{'--world-device' if option else '--profile'}: {e}") from e
        count = len(inventory.devices)
        if inventory.on_host:
            return f"concord: no accelerator in use: ranks on cpu, {count} worlds side by side (one for each core)"
        return f"concord: {count} {inventory.kind} devices: {', '.join(inventory.keys)}"
