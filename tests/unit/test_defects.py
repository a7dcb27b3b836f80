"""Known defects: what is read from their files, which of them count for a profile, and what is said of bad ones."""

from __future__ import annotations

import datetime
import json
import time
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness import entry_points
from harness.entry_points import Point
from harness.plugin.waivers import Conditions, Review, review
from harness.profiles import (
    DEFECT_KEYS,
    Condition,
    Defects,
    Platform,
    Profile,
    ProfileError,
    Waiver,
    defects_among,
    is_of_defects,
    parse,
    parse_defects,
)
from harness.profiles.recorded import as_recorded
from harness.profiles.schema import schema_of_defects, text
from harness.profiles.shelf import SHIPPED_DEFECTS, Shelf
from harness.results import ENDED_BADLY

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / SHIPPED_DEFECTS).glob("*.toml"))
WITHOUT_SCRIPT = {
    "changed_timeout": "it needs a backend of another package",
    "compiled_drawn_on_cuda": "accelerator_drawn shows it, on an accelerator",
    "compiled_sizes_on_gloo": "compiled_sizes shows it, on an accelerator",
    "fsdp1_compiled_streams": "it needs an accelerator with streams",
    "fsdp_no_inputs": "it needs an accelerator and PyTorch before 2.13",
    "init_barrier_leaves_group": "it needs a backend that does not connect ranks at once",
    "monitored_barrier": "it needs a backend of another package",
    "no_all_gather_coalesced": "it needs NCCL",
    "premultiplied_bfloat16": "it needs NCCL and PyTorch before 2.14",
    "profile_of_lists": "it needs NCCL",
    "refused_inside_a_group": "it needs NCCL",
    "split_options_of_gloo": "it needs an accelerator and PyTorch before 2.14",
    "unchecked_exchange": "it needs NCCL",
    "unchecked_lists": "it needs NCCL",
    "undefined_future": "it needs NCCL",
}
"""Shipped defects for which docs/findings has no script, with the reason."""

SILENT = {"compiled_backward_hooks": "nothing is wrong but the time it takes"}
"""Shipped defects that are silent and not wrong, with the reason."""

HEAD = 'name = "p"\nbackend = "gloo"\ndevice = "cpu"\n'
OWNER = 'owner = "ours"\n'


def entry(id: str, *lines: str) -> str:
    """A defect, of six lines and those given."""
    rest = "".join(f"{line}\n" for line in lines)
    tests = f'tests = ["suites/{id}"]\nreason = "wrong {id}"\nlink = "unreported"\nexpires = 2027-06-30\n'
    return f'[[defect]]\nid = "{id}"\n{tests}{rest}'


OURS = OWNER + entry("a") + entry("b", 'devices = ["cpu"]') + entry("c", 'devices = ["!cpu"]')
THEIRS = 'owner = "theirs"\nbackends = ["gloo"]\n' + entry("a") + entry("d", 'backends = ["!gloo"]')
KNOWN = (parse_defects(OURS, "x/ours.toml"), parse_defects(THEIRS, "x/theirs.toml"))


def counting(profile: str, known: tuple[Defects, ...] = KNOWN) -> list[str]:
    """The names of the defects that count for a profile."""
    return [waiver.named for waiver in parse(profile, "p.toml", None, known).waivers]


def mistakes(text: str, file: str = "ours.toml") -> list[str]:
    """What is said of a bad file of defects, a line each."""
    with pytest.raises(ProfileError) as caught:
        parse_defects(text, file)
    return str(caught.value).split("\n")


class TestGoodFiles:
    def test_every_key(self) -> None:
        """A defect is a waiver with an owner, an id and a place; the backends of the head are those of its defects."""
        lines = ('subjects = ["torch", "reference"]', 'verdicts = ["hung"]', 'torch = "<3"', 'devices = ["cpu"]')
        found = parse_defects(OWNER + 'about = "us"\nbackends = ["gloo"]\n' + entry("a", *lines), "x/ours.toml")
        (defect,) = found.defects
        assert (found.owner, found.about, found.file) == ("ours", "us", "x/ours.toml")
        assert (defect.backends, defect.devices, defect.waiver.when.torch) == (("gloo",), ("cpu",), "<3")
        waiver = defect.waiver
        assert (waiver.tests, waiver.reason, waiver.link) == (("suites/a",), "wrong a", "unreported")
        assert (waiver.owner, waiver.defect, waiver.named, waiver.place) == ("ours", "a", "ours/a", "x/ours.toml:4")
        assert (waiver.verdicts, waiver.subjects) == (("hung",), ("torch", "reference"))
        assert waiver.expires == datetime.date(2027, 6, 30)

    def test_kind(self) -> None:
        """A defect may say its kind; without a word it has none."""
        said, silent = parse_defects(OWNER + entry("a", 'kind = "hang"') + entry("b"), "ours.toml").defects
        assert (said.kind, silent.kind) == ("hang", "")

    def test_intermittent(self) -> None:
        """One that shows now and then says what its tests come to."""
        found = parse_defects(OWNER + entry("a", "intermittent = true", 'verdicts = ["passed", "hung"]'), "ours.toml")
        assert (found.defects[0].waiver.intermittent, found.defects[0].waiver.verdicts) == (True, ("passed", "hung"))

    def test_is_of_defects(self) -> None:
        """A file with an owner is one of defects, one with a name is a profile, and others are neither."""
        assert [is_of_defects(each) for each in (OURS, HEAD, "", "= 3", OWNER + HEAD)] == [True, *[False] * 4]

    def test_every_key_is_documented(self) -> None:
        """docs/profiles.md names every key."""
        page = (ROOT / "docs/profiles.md").read_text()
        named = [key for keys in DEFECT_KEYS.values() for key in keys]
        assert [key for key in named if f"`{key}`" not in page and f"\n[[{key}]]\n" not in page] == []


class TestShipped:
    @pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
    def test_schema(self, path: Path) -> None:
        """Shipped files can be read, are of the schema, and say where it is."""
        parse_defects(path.read_text(), path.name)
        first = path.read_text().split("\n")[0]
        assert (path.parent / first.removeprefix("#:schema ")).resolve() == ROOT / "docs/schemas/defects.schema.json"
        document: Any = json.loads(json.dumps(tomllib.loads(path.read_text()), default=datetime.date.isoformat))
        assert list(jsonschema.Draft202012Validator(schema_of_defects()).iter_errors(document)) == []

    @pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
    def test_kinds(self, path: Path) -> None:
        """Every shipped defect says its kind, and one whose reason says that it is silent is of the kind wrong."""
        defects = parse_defects(path.read_text(), path.name).defects
        assert [each.waiver.defect for each in defects if not each.kind] == []
        mild = {each.waiver.defect for each in defects if "silently" in each.waiver.reason and each.kind != "wrong"}
        assert mild - {*SILENT} == set()

    def test_schema_in_step(self) -> None:
        """The published schema is what the reader's keys make; regenerate it as harness/profiles/schema.py says."""
        assert (ROOT / "docs/schemas/defects.schema.json").read_text() == text(schema_of_defects())
        jsonschema.Draft202012Validator.check_schema(schema_of_defects())

    @pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
    def test_scripts(self, path: Path) -> None:
        """A shipped defect has the name of its script, and the page of findings has it."""
        page = (ROOT / "docs/findings.md").read_text()
        ids = [each.waiver.defect for each in parse_defects(path.read_text(), path.name).defects]
        scripts = [each for each in ids if each not in WITHOUT_SCRIPT]
        lacking = [each for each in scripts if not (ROOT / f"docs/findings/{each}.py").is_file()]
        assert (lacking, [each for each in scripts if f"[{each}](findings/{each}.py)" not in page]) == ([], [])

    def test_ids_without_script(self) -> None:
        """Those without a script are shipped defects."""
        known = {each.waiver.defect for path in SHIPPED for each in parse_defects(path.read_text(), path.name).defects}
        assert set(WITHOUT_SCRIPT) <= known

    def test_profiles_have_them(self) -> None:
        """Every shipped profile has those of PyTorch, and those of its backend alone, without a waiver of its own."""
        owners = {
            path.stem: sorted({waiver.owner for waiver in Shelf(ROOT).read(path).waivers})
            for path in (ROOT / "fixtures/profiles").glob("*-*.toml")
        }
        gloo = ["gloo", "pytorch"]
        others = {name: ["pytorch"] for name in ("cuda-nccl", "npu-hccl", "rocm-nccl", "xpu-xccl")}
        assert owners == {"cpu-gloo": gloo, "cuda-gloo": gloo, **others}

    @pytest.mark.parametrize(("backend", "device"), [("gloo", "cpu"), ("simccl", "sim")])
    def test_what_is_seen(self, backend: str, device: str) -> None:
        """A defect that shows without special hardware names the texts by which its failures are known."""
        silent = {
            defect.waiver.defect
            for path in SHIPPED
            for defect in parse_defects(path.read_text(), path.name).defects
            if not defect.waiver.shows and defect.concerns(backend, device)
        }
        assert silent == set()

    @pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
    def test_seen_in_failures_alone(self, path: Path) -> None:
        """No text is in the source of a test, which the report of any failure quotes."""
        quoted = [
            (defect.waiver.defect, text)
            for defect in parse_defects(path.read_text(), path.name).defects
            for file in {test.partition("::")[0] for test in defect.waiver.tests}
            for text in defect.waiver.shows
            if text in (ROOT / file).read_text()
        ]
        assert quoted == []


class TestCounting:
    def test_without_a_word(self) -> None:
        """A profile has the defects that show on its backend and its device, before its own waivers."""
        own = entry("x").replace("defect", "waiver").replace('id = "x"\n', "")
        assert counting(HEAD + own) == ["ours/a", "ours/b", "theirs/a", "p"]
        assert counting(HEAD.replace("gloo", "mine").replace("cpu", "sim")) == ["ours/a", "ours/c", "theirs/d"]

    @pytest.mark.parametrize(
        ("table", "expected"),
        [
            ('without = ["ours/a"]', ["ours/b", "theirs/a"]),
            ('without = ["theirs"]', ["ours/a", "ours/b"]),
            ('without = ["ours", "theirs"]', []),
            ('with = ["ours/c"]', ["ours/a", "ours/b", "ours/c", "theirs/a"]),
            ('with = ["theirs"]', ["ours/a", "ours/b", "theirs/a", "theirs/d"]),
            ('with = ["theirs"]\nwithout = ["theirs/a"]', ["ours/a", "ours/b", "theirs/d"]),
            ('with = ["ours/c"]\nwithout = ["ours"]', ["ours/c", "theirs/a"]),
        ],
    )
    def test_with_and_without(self, table: str, expected: list[str]) -> None:
        """A profile adds and leaves out owners, and single defects, which go before their owners."""
        assert counting(f"{HEAD}[defects]\n{table}\n") == expected

    def test_inherited(self) -> None:
        """What is added and left out is inherited; whom a profile keeps is not."""
        base = HEAD.replace('"p"', '"base"') + '[defects]\nwith = ["ours/c"]\nkeep = ["ours"]\n'
        head = 'name = "p"\ninherits = "base"\n[defects]\nwithout = ["theirs"]\n'
        found = parse(head, "p.toml", lambda name, file: ("base.toml", base), KNOWN)
        assert [waiver.named for waiver in found.waivers] == ["ours/a", "ours/b", "ours/c"]
        assert (found.keeps, found.bases) == ((), ("base.toml",))

    def test_owner_of_inherited_waivers(self) -> None:
        """A waiver is its profile's, also where another inherits it."""
        base = HEAD.replace('"p"', '"base"') + entry("x").replace("defect", "waiver").replace('id = "x"\n', "")
        found = parse('name = "p"\ninherits = "base"\n', "p.toml", lambda name, file: ("base.toml", base))
        assert [waiver.named for waiver in found.waivers] == ["base"]

    @pytest.mark.parametrize(
        ("table", "expected"),
        [
            ('without = ["ours/aa"]', "p.toml:5: defects.without: there is no 'ours/aa'; did you mean ours/a?"),
            ('with = ["thiers"]', "p.toml:5: defects.with: there is no 'thiers'; did you mean theirs?"),
            ('without = ["d"]', "p.toml:5: defects.without: there is no 'd'; did you mean theirs/d?"),
            ('keep = ["ours/a"]', "p.toml:5: defects.keep: a name of letters, digits, '_', '-' and '.', not 'ours/a'"),
            ('keep = ["xyz"]', "p.toml:5: defects.keep: there is no 'xyz'; owners are ours, theirs"),
            ('with = ["ours"]\nwithout = ["ours"]', "p.toml:6: defects.without: ours is in with, too"),
            ('with = ["a/b/c"]', "p.toml:5: defects.with: an owner, or a single defect as \"owner/id\", not 'a/b/c'"),
            ("without = 3", "p.toml:5: defects.without: a list in brackets, not 3"),
            ("witout = []", "p.toml:5: defects.witout: no such key; did you mean without?"),
        ],
    )
    def test_mistakes(self, table: str, expected: str) -> None:
        """A name that there is not is an error, with the nearest."""
        with pytest.raises(ProfileError) as caught:
            parse(f"{HEAD}[defects]\n{table}\n", "p.toml", None, KNOWN)
        assert str(caught.value) == expected

    def test_no_table(self) -> None:
        """A list of defects in a profile is one mistake."""
        with pytest.raises(ProfileError) as caught:
            parse(HEAD + "defects = []\n", "p.toml", None, KNOWN)
        assert str(caught.value) == "p.toml:4: defects: a table, begun with [defects], not []"


class TestMistakes:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", 'ours.toml:1: owner: is missing; write owner = "my-package"'),
            ('owner = "us"', "ours.toml:1: owner: the file of us is called us.toml"),
            ('owner = "a/b"', "ours.toml:1: owner: a name of letters, digits, '_', '-' and '.', not 'a/b'"),
            (OWNER + "defects = 3", "ours.toml:2: defects: no such key; did you mean defect?"),
            (OWNER + "defect = 3", "ours.toml:2: [[defect]]: begin each with [[defect]], in two brackets"),
            (OWNER + entry("a", "device = 3"), "ours.toml:8: [[defect]] device: no such key; did you mean devices?"),
            (OWNER + entry("a") + entry("a"), "ours.toml:9: [[defect]] id: a is there already, in line 2"),
            (
                OWNER + entry("a b"),
                "ours.toml:3: [[defect]] id: a name of letters, digits, '_', '-' and '.', not 'a b'",
            ),
            (
                OWNER + entry("a", 'backends = ["gloo", "!nccl"]'),
                "ours.toml:8: [[defect]] backends: either names, or names after a !, which are left out; not both",
            ),
            (OWNER + entry("a", 'devices = ["!"]'), "ours.toml:8: [[defect]] devices: a name after every !"),
            (
                OWNER + entry("a", 'kind = "wrongg"'),
                "ours.toml:8: [[defect]] kind: 'wrongg' is not a kind of defect; did you mean wrong?",
            ),
            (
                OWNER + entry("a", "kind = 3"),
                "ours.toml:8: [[defect]] kind: 3 is not a kind of defect; write some of wrong, hang, crash, error,",
            ),
            (OWNER + entry("a", "devices = []"), "ours.toml:8: [[defect]] devices: is empty"),
            (
                OWNER + entry("a", "intermittent = true"),
                'ours.toml:2: [[defect]] verdicts: is missing; write verdicts = ["passed", "failed"]',
            ),
            (OWNER + entry("a", 'torch = "2.x"'), "ours.toml:8: [[defect]] torch: a condition on versions, as in "),
            (OWNER + "= 3", "ours.toml:2: "),
        ],
    )
    def test_told(self, text: str, expected: str) -> None:
        """Each mistake is a line with file, line and key."""
        (told,) = mistakes(text)
        assert told.startswith(expected)

    def test_missing_keys(self) -> None:
        """A defect needs a name, tests, a reason, a link and a last day."""
        found = mistakes(OWNER + "[[defect]]\n")
        assert [line.split(": ")[1] for line in found] == [
            f"[[defect]] {key}" for key in ("id", "tests", "reason", "link", "expires")
        ]

    @pytest.mark.parametrize(
        "hostile",
        [
            OWNER + "[[defect]]\n" * 40_000,
            OWNER + "".join(f"k{i} = 1\n" for i in range(40_000)),
            OWNER + f"backends = {[f'!b{i}' for i in range(40_000)]}\n" + entry("a", 'devices = ["\\u001b[31m"]'),
            OWNER + entry("a", f'devices = ["{"x" * 400_000}"]', "torch = 3"),
            OWNER + "defect = " + "[" * 50_000,
            OWNER + "\0",
        ],
        ids=["tables", "keys", "backends", "long", "deep", "binary"],
    )
    def test_hostile(self, hostile: str) -> None:
        """A file that means ill is some mistakes, in no time, without a control character."""
        began = time.monotonic()
        found = mistakes(hostile)
        assert time.monotonic() - began < 5
        assert 1 <= len(found) <= 51
        assert all(len(line) < 500 and line.isprintable() for line in found)

    def test_hostile_names(self) -> None:
        """A profile that names very many defects that there are not is some mistakes, in no time."""
        shipped = Shelf(ROOT).defects()
        began = time.process_time()
        with pytest.raises(ProfileError) as caught:
            parse(f"{HEAD}[defects]\nwithout = {[f'gloo/x{i}' for i in range(20_000)]}\n", "p.toml", None, shipped)
        assert time.process_time() - began < 5
        assert len(caught.value.mistakes) == 51


class TestRecorded:
    def test_made_again(self) -> None:
        """The texts of a record are all that the profile is made of: from them it is made again."""
        head = HEAD + '[defects]\nwithout = ["ours/b"]\n'
        profile = parse(head, "p.toml", None, KNOWN)
        texts = {"p.toml": head, "x/ours.toml": OURS, "x/theirs.toml": THEIRS, "x/others.toml": "..."}
        told = as_recorded(profile, texts, Platform(), "torch")
        assert list(told.texts) == ["p.toml", "x/ours.toml", "x/theirs.toml"]
        assert [(w.owner, w.defect, w.place) for w in told.waivers] == [
            ("ours", "a", "x/ours.toml:2"),
            ("theirs", "a", "x/theirs.toml:3"),
        ]
        assert parse(told.texts["p.toml"], "p.toml", None, defects_among(told.texts)) == profile

    def test_files(self) -> None:
        """A file of which nothing can count for a backend is not among those that decide, unless it is named."""
        known = (parse_defects(THEIRS.split('[[defect]]\nid = "d"')[0], "theirs.toml"),)
        head = HEAD.replace("gloo", "mine")
        assert parse(head, "p.toml", None, known).files == ("p.toml",)
        named = parse(head + '[defects]\nwithout = ["theirs/a"]\n', "p.toml", None, known)
        assert named.files == ("p.toml", "theirs.toml")


class TestPackages:
    @pytest.fixture
    def shelf(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
        """A shelf with the defects of packages, two of which are broken, and one that takes a shipped owner's name."""
        (tmp_path / "fixtures/defects").mkdir(parents=True)
        (tmp_path / "fixtures/defects/ours.toml").write_text(OURS)
        files = {
            "vendor": 'owner = "vendor"\nbackends = ["mine"]\n' + entry("v"),
            "anywhere": 'owner = "anywhere"\n' + entry("w", 'backends = ["!gloo"]'),
            "broken": 'owner = "broken"\nreson = 3\n',
            "ours": OURS,
        }
        for name, content in files.items():
            package = tmp_path / "site" / f"of_{name}"
            (package / "defects").mkdir(parents=True)
            (package / "__init__.py").write_text("")
            (package / "defects" / f"{name}.toml").write_text(content)
        (tmp_path / "site/of_nothing").mkdir()
        (tmp_path / "site/of_nothing/__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(tmp_path / "site"))
        found = {n: Point("concord.defects", n, f"of_{n}", "vendor 1.0") for n in (*files, "nothing")}
        monkeypatch.setattr(entry_points, "points", lambda group: (found if group == "concord.defects" else {}, []))
        return Shelf(tmp_path)

    def test_found(self, shelf: Shelf) -> None:
        """A package's defects count for its backend; those of others do not know them."""
        mine = shelf.parse(HEAD.replace("gloo", "mine"), "p.toml")
        assert [waiver.named for waiver in mine.waivers] == ["ours/a", "ours/b", "vendor/v"]
        assert [waiver.owner for waiver in shelf.parse(HEAD, "p.toml").waivers] == ["ours", "ours"]

    def test_broken(self, shelf: Shelf) -> None:
        """One that is broken, counts for any backend, or takes the place of a shipped one is left out, with a line."""
        assert [each.owner for each in shelf.defects()] == ["ours", "vendor"]
        anywhere, broken, ours, nothing = (line.replace(str(shelf.root), "") for line in shelf.broken)
        assert "w: name its backends: only PyTorch's defects count for any backend" in anywhere
        assert "broken.toml:2: reson: no such key" in broken
        assert ours.endswith("the defects of ours are shipped with Concord")
        assert nothing.endswith("there is no defects/nothing.toml in the package of_nothing")

    def test_elsewhere(self, tmp_path: Path) -> None:
        """Where a root has no defects, those of Concord's own tree are known."""
        assert {"pytorch", "gloo"} <= {each.owner for each in Shelf(tmp_path).defects()}


class TestReview:
    def reviewed(self, verdicts: dict[str, str], keeps: tuple[str, ...] = (), **other: Any) -> Review:
        """The review of a run with two defects of PyTorch and one waiver of the profile."""
        day = datetime.date(2027, 1, 1)

        def waiver(test: str, line: int, **of: Any) -> Waiver:
            return Waiver((test,), "wrong", "unreported", day, ENDED_BADLY, place=f"p:{line}", **{**other, **of})

        profile = Profile(
            "mine",
            "b",
            "d",
            waivers=(
                waiver("a*", 1, owner="pytorch", defect="tp_a"),
                waiver("b", 2, owner="pytorch", defect="tp_b"),
                waiver("c", 3, owner="mine"),
            ),
            keeps=keeps,
        )
        waived = {"a1": ("p:1", "failed"), "c": ("p:3", "hung")}
        return review(profile, verdicts, waived, Conditions(day, Platform()), whole=True)

    def test_owners(self) -> None:
        """Waived tests are told with the owner of the defect, and counted by owner."""
        found = self.reviewed({"a1": "waived", "b": "not-run", "c": "waived"})
        assert found.waived == (
            "p:1: wrong (pytorch/tp_a, unreported, until 2027-01-01)",
            "    a1 failed",
            "p:3: wrong (mine, unreported, until 2027-01-01)",
            "    c hung",
            "waived tests by owner: pytorch 1, mine 1",
        )
        assert (found.notes, found.stale, found.absent) == ((), (), ())

    def test_does_not_show(self) -> None:
        """A defect of another that does not show is told in a line, and no error; a waiver of its own is stale."""
        found = self.reviewed({"a1": "passed", "a2": "passed", "b": "passed", "c": "passed"})
        assert found.absent == ("2 known defects of pytorch did not show: tp_a, tp_b",)
        assert found.stale == ("p:3: stale: passed: c; take it out, or make it narrower",)

    def test_shows_in_a_part(self) -> None:
        """A defect that shows in one of its tests did show."""
        found = self.reviewed({"a1": "waived", "a2": "passed", "b": "not-run", "c": "waived"})
        assert (found.absent, found.stale) == ((), ())

    def test_no_such_test(self) -> None:
        """A defect of another whose tests are not there is nobody's mistake here."""
        assert self.reviewed({"c": "waived"}).stale == ()

    def test_kept(self) -> None:
        """For a profile that keeps the owner, one that does not show and one without a test are stale."""
        found = self.reviewed({"a1": "waived", "a2": "passed", "c": "waived"}, keeps=("pytorch",))
        assert found.absent == ()
        assert found.stale == (
            "p:1: stale: passed: a2; take it out, or make it narrower",
            "p:2: stale: there is no test 'b'",
        )

    def test_other_versions(self) -> None:
        """A defect of another version of torch is not said to be missing."""
        found = self.reviewed({"a1": "passed", "b": "passed"}, when=Condition(machine=("none",)))
        assert (found.absent, found.stale) == ((), ())
