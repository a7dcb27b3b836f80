"""Decide which world a test gets under the options and the profile of a run, and why it may get none."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from harness import entry_points
from harness.entry_points import BACKENDS, DEVICES
from harness.placement import Need, spread
from harness.plugin import numprocesses, options, perf
from harness.plugin.claims import needs_of, torch_has
from harness.plugin.launching import Launching
from harness.plugin.marks import MEASURED, WorldRequest
from harness.plugin.profiles import Profiles
from harness.profiles.obeyed import Obeyed
from harness.profiles.obeyed import of as obeyed_of
from harness.profiles.vocabulary import FORK, SPAWN
from harness.redaction import remember
from harness.results import Cause, HostLacks, NoBackend, SizeNotClaimed, TooFewDevices, TooFewHosts, TorchLacks

if TYPE_CHECKING:
    from harness.devices import Inventory
    from harness.profiles import Profile
    from harness.worlds.world import WorldSpec


class Specs:
    """The worlds that requests mean, in one pytest process.

    ``first``: functions that every rank calls first, once the subject is in its place.
    """

    def __init__(
        self, config: pytest.Config, profiles: Profiles, first: tuple[tuple[str, str], ...], launching: Launching
    ) -> None:
        self.config = config
        self._launching = launching
        self.profiles = profiles
        self.first = first
        self.subject = options.subject(config)
        self._inventories: dict[str | None, Inventory] = {}

    def spec_of(self, asked: WorldRequest, item: pytest.Item) -> tuple[WorldSpec, Inventory]:
        """Return the specification of the world that a test's request means under this run's options, and the devices.

        Tests that prove a requirement must leave nothing behind on fresh ranks. Others may do as they like.
        """
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
        start = option("rank_start") or (claims and claims.start) or FORK
        warm = mark.warm if mark.warm is not None else claims.warm if claims is not None else None
        warm = warm if warm is not None else not inventory.on_host or start == SPAWN
        style = option("tbstyle", "auto")
        if mark.env:
            remember(dict(mark.env))
        spec = WorldSpec(
            size=asked.size,
            backend=backend,
            device=kind,
            warm=warm,
            start=start,
            hosts=mark.hosts or 1,
            bind_device=claims is not None and claims.bind_device,
            timeout=_timeout(
                mark.timeout, option("world_timeout"), claims.timeout if claims else None, usual=WorldSpec.timeout
            ),
            env=tuple(sorted({**dict(claims.env if claims else ()), **dict(mark.env)}.items())),
            shared_device_env=claims.shared_device_env if claims else (),
            imports=tuple(
                dict.fromkeys((*(claims.imports if claims else ()), *_brought_by(backend, kind), *mark.imports))
            ),
            subject=self.subject.name,
            first=(*self.subject.first, *self.first),
            record=mark.record,
            leaves_nothing=not warm and not mark.keeps and item.get_closest_marker("requirement") is not None,
            network=mark.network or option("rank_network"),
            exclusive=mark.exclusive is True or (mark.exclusive == MEASURED and perf.asked_for(self.config)),
            debug_rank=option("rank_pdb"),
            traceback_style="short" if style in ("auto", "line", "no") else style,
            show_locals=bool(option("showlocals", False)),
            verbosity=max(0, option("verbose", 0)),
        )
        return self.sized(asked, spec, asked.size, inventory), inventory

    def claims(self, backend: str, kind: str) -> Profile | None:
        """Return the run's profile, if it is about worlds of this backend on this type of device."""
        profile = self.profiles.chosen()
        return profile if profile is not None and profile.is_about(backend, kind) else None

    def obeyed(self, spec: WorldSpec) -> Obeyed:
        """Return the claims and tolerances that a test in such a world has to obey."""
        return obeyed_of(self.claims(spec.backend, spec.device), self.profiles.platform())

    def unclaimed(self, item: pytest.Item, obeyed: Obeyed, inventory: Inventory) -> Cause | None:
        """Return why the profile, the type of device or this PyTorch keeps a test from running; None if none does."""
        needs = needs_of(item)
        if inventory.on_host and (what := needs.of_accelerators):
            return HostLacks(what)
        unclaimed = needs.unclaimed(obeyed.claims, obeyed.profile) if obeyed.profile else None
        return unclaimed or (TorchLacks(needs.torch) if needs.torch and not torch_has(needs.torch) else None)

    def ranks_per_device(self, spec: WorldSpec) -> int:
        """Return how many ranks of a world share an accelerator."""
        claims = self.claims(spec.backend, spec.device)
        asked: int | None = self.config.getoption("ranks_per_device")
        return asked or (claims.ranks_per_device if claims is not None else 1)

    def inventory(self, kind: str | None) -> Inventory:
        """Return the devices of a type, looked up once."""
        from harness import devices

        if kind not in self._inventories:
            if self._launching.remote:
                self._inventories[kind] = self._launching.inventory(kind)
            else:
                imports, mask = self.profiles.ways_to(kind)
                self._inventories[kind] = devices.inventory(kind, imports=imports, mask=mask)
        return self._inventories[kind]

    def need(self, spec: WorldSpec) -> Need:
        """Return what a world needs of an inventory."""
        shares = numprocesses.worlds_per_device(self.config) if spec.device != "cpu" and not spec.exclusive else 1
        return Need(spec.size, self.ranks_per_device(spec), spec.hosts, whole=spec.exclusive, shares=shares)

    def sized(self, asked: WorldRequest, spec: WorldSpec, size: int, inventory: Inventory) -> WorldSpec:
        """Return the specification of a test's world of a size.

        Unless the test says on how many hosts it is, it is on as many as have enough devices with ``--spread``, and
        otherwise on as few.
        """
        spec = spec.sized(size)
        if asked.mark.hosts:
            return spec
        hosts = self._launching.hosts(size, inventory)
        return dataclasses.replace(spec, hosts=spread(self.need(spec), inventory, hosts).hosts)

    def fitting(self, asked: WorldRequest, spec: WorldSpec, inventory: Inventory) -> tuple[int, ...]:
        """Return those of a test's world sizes that this run can have."""
        worlds = [self.sized(asked, spec, size, inventory) for size in asked.mark.sizes]
        return tuple(world.size for world in worlds if self.unsupported(world, inventory) is None)

    def unsupported(self, spec: WorldSpec, inventory: Inventory) -> Cause | None:
        """Return why this run can't have such a world; None if it can. Decided before any rank starts."""
        import torch.distributed as dist

        if not spec.imports and not dist.is_backend_available(spec.backend):
            return NoBackend(spec.backend)
        claims = self.claims(spec.backend, spec.device)
        if claims is not None and claims.world_sizes and spec.size not in claims.world_sizes:
            return SizeNotClaimed(claims.name, claims.world_sizes, spec.size)
        if spec.hosts > self._launching.most_hosts:
            return TooFewHosts(spec.hosts, self._launching.most_hosts)
        need = self.need(dataclasses.replace(spec, exclusive=False))
        if need.fits(inventory):
            return None
        each = tuple(Counter(inventory.hosts).values())
        have = len(inventory.devices)
        return TooFewDevices(spec.size, need.count(inventory), inventory.kind, have, each if len(each) > 1 else ())


def _timeout(of_test: float | None, option: float | None, of_profile: float | None, *, usual: float) -> float:
    """Return the seconds for one run on ranks.

    A test that states its own has the host in mind: where the profile allows more than is usual, so does the test.
    """
    if of_test is not None:
        return of_test * max(1.0, (of_profile or usual) / usual)
    return option or of_profile or usual


def _brought_by(backend: str, kind: str) -> tuple[str, ...]:
    """Return the modules that packages name for a backend and a type of device."""
    return (*entry_points.modules_for(DEVICES, kind), *entry_points.modules_for(BACKENDS, backend))
