"""Bands of series that changed alike, described in few words: ranges of sizes, sets of dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

from harness.bench.records import Series, size_of

_ORDER = ("bytes", "dtype", "op", "variant", "world", "operation", "metric", "backend", "device")
"""Fields that can differ within a band, the likeliest first."""


def bands(changed: Iterable[Series], measured: Sequence[Series]) -> list[list[Series]]:
    """Partition the changed series into bands.  Returns the largest band first.

    A band is all ``measured`` combinations of some values of each field.  No other measured size is between
    its sizes.
    """
    fields = sorted({("variant", name) for one in measured for name, _ in one.variant})
    names: list[tuple[str, str]] = [(name, "") for name in _ORDER if name != "variant"]
    names[3:3] = fields
    groups = [{name: frozenset([_value(one, name)]) for name in names} for one in dict.fromkeys(changed)]
    sizes: _Sizes = defaultdict(set)
    for one in measured:
        sizes[_key(one, names)].add(one.bytes)
    while True:
        before = len(groups)
        for name in names:
            groups = _merged(groups, name, names, sizes)
        if len(groups) == before:
            break
    out: list[list[Series]] = [[] for _ in groups]
    for one in dict.fromkeys(changed):
        place = next(i for i, group in enumerate(groups) if all(_value(one, n) in group[n] for n in names))
        out[place].append(one)
    return sorted((band for band in out if band), key=lambda band: (-len(band), band[0].name))


def _value(one: Series, name: tuple[str, str]) -> Any:
    field, variant = name
    return dict(one.variant).get(variant, "") if field == "variant" else getattr(one, field)


def _key(one: Series, names: list[tuple[str, str]]) -> tuple[Any, ...]:
    return tuple(_value(one, name) for name in names if name[0] != "bytes")


_Group = dict[tuple[str, str], frozenset[Any]]
_Sizes = dict[tuple[Any, ...], set[int]]


def _merged(groups: list[_Group], name: tuple[str, str], names: list[tuple[str, str]], sizes: _Sizes) -> list[_Group]:
    """Merge groups that differ only in field ``name``.  Sizes are merged only if no measured size lies between them."""
    alike: dict[tuple[frozenset[Any], ...], list[_Group]] = defaultdict(list)
    for group in groups:
        alike[tuple(group[other] for other in names if other != name)].append(group)
    out: list[_Group] = []
    for members in alike.values():
        if name[0] != "bytes":
            out.append({**members[0], name: frozenset().union(*(group[name] for group in members))})
            continue
        between = sorted(_sizes_of(members[0], names, sizes))
        members = sorted(members, key=lambda group: min(group[name]))
        runs = [members[0]]
        for group in members[1:]:
            last, first = between.index(max(runs[-1][name])), between.index(min(group[name]))
            if first <= last + 1:
                runs[-1] = {**group, name: runs[-1][name] | group[name]}
            else:
                runs.append(group)
        out += runs
    return out


def _sizes_of(group: _Group, names: list[tuple[str, str]], sizes: _Sizes) -> set[int]:
    union: set[int] = set()
    for key in product(*(group[name] for name in names if name[0] != "bytes")):
        union |= sizes.get(key, set())
    return union


def describe(band: Sequence[Series], measured: Sequence[Series]) -> str:
    """Describe a band for people: ``all_reduce float32 64 KiB to 512 KiB on 4 ranks``.

    If a band has all values of a field that were measured for its operations, the field is left out or called "every".
    """
    operations = sorted({one.operation for one in band})
    peers = [one for one in measured if one.operation in set(operations)]
    words = [_listed(operations, 6)]
    for field, plural in (("op", "every op"), ("dtype", "every dtype")):
        mine, theirs = ({getattr(one, field) for one in some} - {""} for some in (band, peers))
        if mine:
            words.append(plural if len(mine) > 1 and mine == theirs else _listed(sorted(mine), 6))
    sizes, every = sorted({one.bytes for one in band} - {0}), {one.bytes for one in peers} - {0}
    if sizes:
        whole = len(sizes) > 1 and set(sizes) == every
        words.append("of every size" if whole else _range([size_of(size) for size in sizes]))
    worlds = sorted({one.world for one in band} - {0})
    if worlds:
        words.append(f"on {_listed([str(world) for world in worlds], 6)} ranks")
    words += _rest(band, peers)
    metrics = sorted({one.metric for one in band} - {"time"})
    return " ".join(words) + (f" ({', '.join(metrics)})" if metrics else "")


def _rest(band: Sequence[Series], peers: Sequence[Series]) -> list[str]:
    """Describe backend, device and variants if other series of the same operations differ in them."""
    words = []
    for field in ("backend", "device"):
        mine, theirs = ({getattr(one, field) for one in some} for some in (band, peers))
        if mine != theirs:
            words.append(_listed(sorted(mine), 3))
    for name in sorted({name for one in peers for name, _ in one.variant}):
        mine, theirs = ({dict(one.variant).get(name, "") for one in some} for some in (band, peers))
        if mine != theirs:
            words.append(f"{name} {_listed(sorted(mine - {''}), 4)}" if mine - {""} else f"without {name}")
    return [f"({', '.join(words)})"] if words else []


def _listed(names: Sequence[str], most: int) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
