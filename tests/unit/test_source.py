"""House rules that the source itself can be asked about."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PRIVATE_TORCH = {
    "harness/audit/mutants.py": "names of the modules whose functions are edited",
    "harness/audit/sites.py": "a call that only logs is known by its name",
    "harness/worlds/wire.py": "tensors of newer dtypes can only be put together again by torch's own function",
    "harness/worlds/unpickling.py": "pickles of tensors name the functions that put them together",
    "harness/worlds/monitor.py": "the Flight Recorder has no public reader, nor have the names of process groups",
    "harness/worlds/issued.py": "sequence numbers of groups, which count what C++ issues, have no public name",
    "harness/worlds/recorder.py": "collectives are noted where Python enters the C++ class",
    "harness/worlds/residue.py": "how many groups a test left, and whether Dynamo has caches to empty",
    "harness/worlds/kept.py": "modes, hooks of saved tensors and pending works have no public name",
    "harness/programs/residue.py": "what a run left in the process is where no public name reaches",
    "harness/oracles/proof.py": "what sees every operation, whatever issues it, has no public name",
    "harness/worlds/runtimes.py": "what starts the runtime of a device is in torch._C alone",
    "harness/versions/scripts_on_ranks.py": "names of modules that scripts of findings import, imported once for all",
    "harness/worlds/preloading.py": "names of modules that the server imports ahead, so that no rank has to",
    "harness/worlds/tables.py": "what torch keeps from its first use, made ahead in the server; without it, ranks do",
    "harness/reference/replicate.py": "the registry of composable APIs, and what runs at the end of a backward",
    "harness/reference/replicate_fsdp.py": "the registry, the end of a backward, and the mesh that a dimension is of",
    "harness/worlds/meshes.py": "no public function empties what DTensor remembers of meshes",
    "harness/reference/tp_extension.py": "sharded tensors, and collectives that have not ended, have no public names",
    "harness/oracles/rounding.py": "every operation of a run is recorded below autograd, which no public mode can",
}
"""Where private names of torch are needed outside harness/stacks/, and what for."""

NAMES = {
    *(
        "gloo",
        "nccl",
        "mpi",
        "ucc",
        "xccl",
        "hccl",
        "oneccl",
        "ccl",
        "rccl",
        "cncl",
        "eccl",
        "lccl",
        "mccl",
        "smddp",
        "fake",
    ),
    *("cuda", "xpu", "hpu", "npu", "mps", "mtia", "xla", "mlu", "musa", "gcu", "maia", "ipu", "hip", "rocm", "tpu"),
    *("vulkan", "privateuseone", "privateuse1", "openreg", "sim", "simccl"),
}
"""Backends and types of devices.  The host is none of them: ``cpu`` may be named."""

NAMED = {
    ("harness/bench/history/nccl_tests.py", "nccl"): "nccl-tests measures this backend and no other",
    ("harness/bench/history/nccl_tests.py", "cuda"): "nccl-tests runs on this type of device and no other",
    ("harness/versions/catalog.py", "gloo"): "the scripts of findings name it, and their recorded outcomes are of it",
    ("harness/stacks/pretended.py", "fake"): "the backend with which one process pretends to be a rank of many",
    (
        "suites/dynamo/groups/test_object_protocol.py",
        "fake",
    ): "the backend with which one process pretends to be a rank of many",
    ("suites/dynamo/contracts.py", "gloo"): "compiled code compares the name of its backend with some name",
    (
        "suites/collectives/stores/test_beginnings.py",
        "gloo",
    ): "it connects ranks when a group begins, others may do so later",
    ("suites/collectives/groups/test_hosts.py", "gloo"): "of all backends, it alone reads its interface for each new group",
    ("suites/replicate/modules/test_application.py", "cuda"): "a type of device that torch always knows, and no rank is on",
}
"""Where a name of a backend, or of a type of device, is written all the same, and why."""

LONGEST = 450
"""How many lines a file of harness/ or reports/ may have without a reason in docs/architecture.md."""

VAGUE = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}

MACHINE = re.compile(
    r"/(?:home|Users|root)/\w|/wor[k]/(?:main|shared|venv)\b|/tm[p]/\w+\.(?:py|txt|log)\b"  # paths of one machine
    r"|\b(?:Africa|America|Asia|Australia|Europe|Pacific)/[A-Z][a-z]+|\b(?:UTC|GMT)[+-]\d|\bCES?T\b"  # its time zone
)


def python_files(*folders: str) -> list[str]:
    found = [p.relative_to(ROOT) for folder in folders for p in (ROOT / folder).rglob("*.py")]
    written_by_runs = Path("reports", "out")
    return sorted(str(p) for p in found if "__pycache__" not in p.parts and not p.is_relative_to(written_by_runs))


def imports(file: str) -> Iterator[str]:
    """Full names of what a file imports, inside functions as well; of ``from a import b`` it is ``a.b``."""
    package = Path(file).parent.parts
    for node in ast.walk(ast.parse((ROOT / file).read_text(), file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = [*package[: len(package) + 1 - node.level]] if node.level else []
            module = ".".join([*parts, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def private_torch(file: str) -> list[str]:
    """Private names of torch in a file: imported, reached from ``torch`` or ``dist``, or named in a string."""
    found = [name for name in imports(file) if name.split(".")[0] == "torch"]
    for node in ast.walk(ast.parse((ROOT / file).read_text(), file)):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if re.fullmatch(r"(torch|dist|c10d)(\.\w+)+", text):
                found.append(text)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            found.append(str(node.value))
    return sorted({name for name in found if any(re.match(r"_(?!_)", part) for part in name.split("."))})


@pytest.mark.parametrize("file", python_files("harness", "suites", "reports", "fixtures", "tests"))
def test_name_says_what_it_is_about(file: str) -> None:
    """No file or folder is called something that says nothing."""
    assert not VAGUE & {part.removeprefix("test_").removesuffix(".py") for part in Path(file).parts}


def long_files() -> list[str]:
    files = python_files("harness", "reports")
    return [file for file in files if len((ROOT / file).read_text().splitlines()) > LONGEST]


def explained() -> list[str]:
    """The files that have a reason in the architecture page's table of long files."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    (section,) = re.findall(rf"^## Files over {LONGEST} lines\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    return sorted(re.findall(r"^\| `([^`|]+)` \| *\w[^|]* \|$", section, re.MULTILINE))


def test_long_files_have_a_reason() -> None:
    """The architecture page says of every long file, and of no other, why it is not two."""
    assert long_files() == explained()


def test_long_files_are_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is long with one line more than allowed; a row of the table without a reason explains nothing."""
    for file, lines in (
        ("harness/a/long.py", LONGEST + 1),
        ("harness/short.py", LONGEST),
        ("suites/x.py", 2 * LONGEST),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("pass\n" * lines)
    (tmp_path / "docs").mkdir()
    rows = ["| `before.py` | why |", f"## Files over {LONGEST} lines", "", "| file | reason |", "|---|---|"]
    rows += [
        "| `b.py` | one automaton |",
        "| `none.py` |  |",
        "| `a.py` | one table |",
        "## Next",
        "| `after.py` | why |",
    ]
    (tmp_path / "docs" / "architecture.md").write_text("\n".join(rows) + "\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert long_files() == ["harness/a/long.py"]
    assert explained() == ["a.py", "b.py"]


@pytest.mark.parametrize("file", python_files("harness"))
def test_harness_imports_no_tests(file: str) -> None:
    """The harness knows nothing of the suites that run on it, nor of its own tests."""
    assert [name for name in imports(file) if name.split(".")[0] in ("suites", "tests", "conftest")] == []


@pytest.mark.parametrize("file", python_files("harness", "suites", "reports"))
def test_private_names_of_torch(file: str) -> None:
    """Private names of torch are in the adapters, and in the few files that say here why they need them."""
    if not file.startswith("harness/stacks/") and file not in PRIVATE_TORCH:
        assert private_torch(file) == []


@pytest.mark.parametrize("file", PRIVATE_TORCH)
def test_exceptions_are_needed(file: str) -> None:
    """A file that may use private names of torch does use one."""
    assert private_torch(file) != []


def named(file: str) -> set[str]:
    """The names of backends and types of devices that a file has as strings, with an ordinal or without."""
    strings = (n.value for n in ast.walk(ast.parse((ROOT / file).read_text(), file)) if isinstance(n, ast.Constant))
    words = (re.fullmatch(r"(\w+)(:\d+)?", text.strip().lower()) for text in strings if isinstance(text, str))
    return {word[1] for word in words if word} & NAMES


@pytest.mark.parametrize("file", [*python_files("harness", "suites"), "conftest.py"])
def test_no_names_of_backends(file: str) -> None:
    """No backend and no accelerator is known by its name: torch is asked, or the profile."""
    assert {name for name in named(file) if (file, name) not in NAMED} == set()


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_names_are_needed(file: str, name: str) -> None:
    """What may be named in a file is named there."""
    assert name in named(file)


def test_names_that_torch_knows() -> None:
    """Every backend that torch itself brings is one of the names that are looked for."""
    import torch.distributed as dist

    assert set(dist.Backend.backend_list) - {"undefined"} <= NAMES
    assert set(dist.Backend.default_device_backend_map) - {"cpu"} <= NAMES


def test_names_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is found whatever is made of it; a word in a sentence, or an attribute, is none."""
    lines = ["a = 'gloo'", "b = {'cuda:3': ' NCCL '}", "c = 'gloo works'", "d.cuda = 'cpu'", "f(xpu='')"]
    (tmp_path / "x.py").write_text("\n".join(lines))
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert named("x.py") == {"gloo", "cuda", "nccl"}


def tracked() -> list[str]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []  # not a checkout: nothing is tracked
    return [file for file in listed.split("\0") if file and (ROOT / file).is_file()]


def test_no_trace_of_a_machine() -> None:
    """No tracked file names a path or a time zone of the machine that it was written on."""
    found = []
    for file in tracked():
        try:
            lines = (ROOT / file).read_text().splitlines()
        except UnicodeDecodeError:
            continue  # not a text
        found += [f"{file}:{i}: {line.strip()[:100]}" for i, line in enumerate(lines, 1) if MACHINE.search(line)]
    assert found == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/ho" + "me/someone/x", True),
        ("TZ=Euro" + "pe/Berlin", True),
        ("12:00 U" + "TC+2", True),
        ("at a house in Europe, and/or America", False),
        ("/work", False),
        ("UTC", False),
    ],
)
def test_traces_are_recognised(text: str, expected: bool) -> None:
    """The pattern finds what it should, and no more."""
    assert bool(MACHINE.search(text)) == expected


def test_private_names_are_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private names are found however they are reached; double underscores are public."""
    lines = [
        "import torch._dynamo",
        "from torch import _C",
        "torch.nn._x.y()",
        "n = 'torch._inductor'",
        "torch.__version__",
    ]
    (tmp_path / "x.py").write_text("\n".join(lines))
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert private_torch("x.py") == ["torch._C", "torch._dynamo", "torch._inductor", "torch.nn._x", "torch.nn._x.y"]


def test_relative_imports_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative import counts as what it means."""
    (tmp_path / "harness" / "worlds").mkdir(parents=True)
    (tmp_path / "harness" / "worlds" / "x.py").write_text("from ..plugin import marks\nfrom . import wire\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert list(imports("harness/worlds/x.py")) == ["harness.plugin.marks", "harness.worlds.wire"]
