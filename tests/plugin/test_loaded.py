"""A run says which plug-ins and files it was made with, whatever way they came in."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import py_compile
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sessions import Folder, Session

from harness.results import foreign
from reports.build import build, load
from reports.markdown import markdown
from reports.page import page

pytestmark = pytest.mark.slow

LIAR = """
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome = "passed"
    return report
"""
LEAVER = (
    LIAR
    + """
def pytest_sessionstart(session):
    import sys
    session.config.pluginmanager.unregister(sys.modules[__name__])
"""
)
BAD = """
    def test_is_bad():
        assert False
"""
ROOT = Path(__file__).parents[2]
TEST = "suites/collectives/test_it.py"
INSTALLED = {
    f"{distribution.name} {distribution.version}"
    for distribution in importlib.metadata.distributions()
    if distribution.entry_points.select(group="pytest11")
}
"""Distributions that pytest loads plug-ins of in this environment, whatever the test is about."""


def strangers(plugins: Mapping[str, str]) -> dict[str, str]:
    """The foreign plug-ins that a session here would not have by itself."""
    return {name: where for name, where in foreign(plugins).items() if where not in INSTALLED}


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture(scope="module")
def folder(make_folder: Callable[[dict[str, str]], Folder]) -> Folder:
    made = make_folder({TEST: BAD})
    made.write("liar.py", LIAR)
    made.write("leaver.py", LEAVER)
    made.write("fixtures/shared.py", "")
    return made


def ran(folder: Folder, *arguments: str, env: dict[str, str] | None = None) -> Session:
    shutil.rmtree(folder.path / "out", ignore_errors=True)
    return folder.run("--concord-results", "out", *arguments, env={"PYTHONPATH": ".", **(env or {})})


def test_an_honest_run_has_no_plugin_of_others(folder: Folder) -> None:
    """Without anybody's plug-in every one is pytest's or Concord's, and files are named with what is in them."""
    session = ran(folder)
    end = session.results.end
    assert end is not None
    assert strangers(session.results.header.plugins) == strangers(end.plugins) == {}
    assert session.results.header.plugins["timeout"].startswith("pytest-timeout ")
    assert end.files[TEST] == hashlib.sha256((folder.path / TEST).read_bytes()).hexdigest()
    assert "harness/plugin/summary.py" in end.files
    said = [line for line in session.out.split("\n") if "neither pytest nor Concord" in line]
    assert [line for line in said if line.rpartition("(")[2].rstrip(")") not in INSTALLED] == []


@pytest.mark.parametrize(
    ("arguments", "env", "name", "text"),
    [
        (["-p", "liar"], {}, "liar", LIAR),
        ([], {"PYTEST_PLUGINS": "liar"}, "liar", LIAR),
        ([], {"PYTEST_ADDOPTS": "-p liar"}, "liar", LIAR),
        (["-p", "leaver"], {}, "leaver", LEAVER),
        (["-p", "liar", "-n", "1"], {}, "liar", LIAR),
    ],
    ids=["-p", "PYTEST_PLUGINS", "PYTEST_ADDOPTS", "that takes itself out", "xdist"],
)
def test_a_plugin_leaves_its_trace(
    folder: Folder, arguments: list[str], env: dict[str, str], name: str, text: str
) -> None:
    """A plug-in that may turn failures into passes is in the results by the hash of its text, and said at the end."""
    session = ran(folder, *arguments, env=env)
    end = session.results.end
    assert end is not None
    assert strangers(session.results.header.plugins) == {name: sha256(text)}
    assert strangers(end.plugins) == {name: sha256(text)}
    assert f"plug-in of neither pytest nor Concord: {name} ({sha256(text)})" in session.out
    assert session.out.count("no bundle of this run shows a level, ") == 1
    said = session.results.header.environment
    assert [said[f"variable {variable}"] for variable in env] == [*env.values()]


def test_a_conftest_leaves_its_trace(folder: Folder) -> None:
    """A conftest.py that turns failures into passes is named as a plug-in; the failure stays in the results."""
    folder.write("conftest.py", LIAR)
    try:
        session = ran(folder)
    finally:
        (folder.path / "conftest.py").unlink()
    assert session.results.tests[f"{TEST}::test_is_bad"].verdict == "failed"
    digest = hashlib.sha256(LIAR.encode()).hexdigest()
    assert strangers(session.results.header.plugins) == {"conftest.py": digest}
    (path,) = session.folder.glob("out/*/results.jsonl")
    made = build([load(path)])
    for text in (page(made), markdown(made, largest=1 << 20)):
        assert "conftest" in text
        assert digest in text


def test_modules_of_entry_points_leave_their_trace(folder: Folder) -> None:
    """Modules that an installed package has had imported are in the results as plug-ins are, whoever imports them."""
    wants = "from harness.requirements import Requirement\nALL = [Requirement('MINE-A-01', 'It is.', 'us')]\n"
    files = {
        "around/__init__.py": "AROUND = 1\n",
        "around/brings.py": wants,
        "leaves.py": "import sys\ndel sys.modules[__name__]\nALL = []\n",
        "breaks.py": "raise RuntimeError('no')\n",
        "draws.py": "def main():\n    pass\n",
        "unused.py": "",
    }
    points = (
        "[concord.requirements]\na = around.brings:ALL\nb = leaves:ALL\nc = breaks:ALL\n[hypothesis]\nd = draws:main\n"
    )
    points += "[concord.backends]\nunused = unused\n"
    metadata = "Metadata-Version: 2.1\nName: brings\nVersion: 1.0\n"
    test = "suites/collectives/test_draws.py"
    told = {"brings-1.0.dist-info/METADATA": metadata, "brings-1.0.dist-info/entry_points.txt": points}
    for name, text in {**files, **told, test: "import hypothesis\n\ndef test_it():\n    pass\n"}.items():
        folder.write(name, text)
    try:
        session = ran(folder, test)
    finally:
        for name in (*files, *told, test):
            (folder.path / name).unlink()
    expected = {name.removesuffix(".py").replace("/", "."): sha256(text) for name, text in files.items()}
    expected["around"] = expected.pop("around.__init__")
    del expected["unused"]
    assert strangers(session.results.header.plugins) == expected
    assert f"plug-in of neither pytest nor Concord: around.brings ({sha256(wants)})" in session.out


def test_what_an_xdist_worker_alone_has_loaded(folder: Folder) -> None:
    """A plug-in that gets into workers only is in the last record; so are the files that only they loaded."""
    sneaks = "import os\nif 'PYTEST_XDIST_WORKER' in os.environ:\n    import liar as pytest_plugins_of_workers\n"
    sneaks += "def pytest_configure(config):\n    import sys\n    if 'liar' in sys.modules:\n"
    sneaks += "        import fixtures.shared\n        config.pluginmanager.register(sys.modules['liar'], 'sneaked')\n"
    folder.write("conftest.py", sneaks)
    try:
        run = ran(folder, "-n", "1").results
    finally:
        (folder.path / "conftest.py").unlink()
    assert run.end is not None
    assert "sneaked" not in run.header.plugins
    assert run.end.plugins["sneaked"] == sha256(LIAR)
    assert run.end.files["fixtures/shared.py"] == sha256("")
    assert TEST in run.end.files


def plant(path: Path, text: str) -> dict[str, str]:
    """Put bytecode of another text in the place of a file's, Python's and pytest's; returns the SHA-256 of each."""
    from importlib.util import cache_from_source

    from _pytest.assertion import rewrite

    other = path.with_name("other_text.py")
    other.write_text(text)
    os.utime(other, ns=(path.stat().st_mtime_ns,) * 2)
    plain = Path(py_compile.compile(str(other), cache_from_source(str(path)), dfile=str(path), doraise=True) or "")
    data = plain.read_bytes()
    plain.write_bytes(data[:12] + path.stat().st_size.to_bytes(4, "little") + data[16:])
    config: Any = SimpleNamespace(getini=lambda name: False)
    tests = plain.with_name(path.stem + rewrite.PYC_TAIL)
    with tests.open("wb") as file:
        stamp, _ = rewrite._rewrite_test(path, config)
        rewrite._write_pyc_fp(file, stamp, rewrite._rewrite_test(other, config)[1])
    other.unlink()
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in (plain, tests)}


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_bytecode_of_another_text(folder: Folder, workers: tuple[str, ...]) -> None:
    """Bytecode that is not its source's is named by its hash, and said at the end; its source's is not."""
    test = "suites/collectives/test_cached.py"
    texts = {test: "def test_it():\n    assert False\n", "fixtures/drawn.py": "DRAWN = 1\n"}
    texts["conftest.py"] = (ROOT / "conftest.py").read_text()
    uses = "import fixtures.drawn, fixtures.true\n\ndef test_it():\n    pass\n"
    honest = {"suites/collectives/test_honest.py": uses, "fixtures/true.py": "TRUE = 1\n"}
    for name, text in (texts | honest).items():
        folder.write(name, text)
    changes = (("False", "True"), ("= 1", "= 2"), ("nothing", "something"))
    lies = {name: functools.reduce(lambda t, change: t.replace(*change), changes, text) for name, text in texts.items()}
    planted = {name: plant(folder.path / name, lie) for name, lie in lies.items()}
    for name, text in honest.items():
        plant(folder.path / name, text)
    try:
        session = ran(folder, *workers, test, next(iter(honest)))
    finally:
        for name in texts | honest:
            (folder.path / name).unlink()
            shutil.rmtree((folder.path / name).parent / "__pycache__", ignore_errors=True)
    assert session.results.tests[f"{test}::test_it"].verdict == "passed", "the bytecode was not executed"
    end = session.results.end
    assert end is not None
    expected = {f"bytecode of {name}": ", ".join(digests.values()) for name, digests in planted.items()}
    assert strangers(end.plugins) == expected
    for name, digests in expected.items():
        assert f"plug-in of neither pytest nor Concord: {name} ({digests})" in session.out


def test_a_file_that_is_changed_while_tests_run(folder: Folder, tmp_path: Path) -> None:
    """Of a file that was changed after it was loaded, both hashes are in the results."""
    text = "from pathlib import Path\n\ndef test_edits():\n    Path(__file__).write_text('# harmless')\n"
    folder.write("suites/collectives/test_edits.py", text)
    try:
        run = ran(folder, "suites/collectives/test_edits.py").results
    finally:
        (folder.path / "suites/collectives/test_edits.py").unlink()
    assert run.end is not None
    assert run.end.files["suites/collectives/test_edits.py"] == f"{sha256(text)}, {sha256('# harmless')}"
