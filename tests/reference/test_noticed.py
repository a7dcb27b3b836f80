"""A reference that is wrong is noticed by the suite of its stack."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness import Pool, RanksFailed, WorldSpec
from harness.subjects import find
from tests.reference.damages import DAMAGES, Damage


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    found = Pool()
    yield found
    found.close()


def run(pool: Pool, damage: Damage, *more: tuple[str, str]) -> None:
    """Run a damage's test on ranks with the reference, and with something more put into them."""
    first = (("harness.subjects:put", find("reference").puts[damage.stack]), *more)
    world = pool.acquire(WorldSpec(damage.size, subject="reference", first=first, timeout=30))
    try:
        damage.test(world, **damage.arguments)
    finally:
        world.kill()


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged(pool: Pool, name: str) -> None:
    """A test fails on ranks whose reference is damaged."""
    with pytest.raises((AssertionError, RanksFailed, pytest.fail.Exception)):
        run(pool, DAMAGES[name], ("tests.reference.damages:put", name))


@pytest.mark.parametrize("name", DAMAGES)
def test_undamaged(pool: Pool, name: str) -> None:
    """The same test passes where it is not."""
    run(pool, DAMAGES[name])
