"""Claims: what a profile says that a backend can do, what that means for tests, and how profiles inherit."""

from __future__ import annotations

import ast
import datetime
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from harness.bench.measuring.collectives import Timed
from harness.devices import DeviceError, accelerators, inventory
from harness.oracles import collectives as model
from harness.oracles.rounding import UNIT
from harness.plugin.claims import Needs, _check, added_up, name_of, needs, torch_has
from harness.profiles import Claims, Condition, Exclusion, Platform, Profile, ProfileError, parse, vocabulary
from harness.profiles.obeyed import in_force, obeying, of
from harness.profiles.schema import schema, text
from harness.profiles.shelf import Shelf
from harness.programs.check import truth_of
from harness.programs.claimed import unclaimed
from harness.requirements import Requirement
from harness.results import NotClaimed
from harness.specs.program import Layout, Linear, Model, Program

ROOT = Path(__file__).parents[2]
HEAD = 'name = "p"\nbackend = "b"\ndevice = "d"\n'
ARM = Platform("2.13.0+cpu", "3.11.4", "aarch64", "Linux 6.8.0-41", "NVIDIA H100 80GB")


def read(text: str) -> Profile:
    return parse(text, "p.toml")


def mistake(text: str) -> str:
    """What is said of a file with one mistake."""
    with pytest.raises(ProfileError) as caught:
        read(text)
    (found,) = str(caught.value).split("\n")
    return found


class TestVocabulary:
    def test_collectives(self) -> None:
        """The words are those of the exact model, and torch's."""
        assert set(vocabulary.COLLECTIVES) == set(model.COLLECTIVES)
        assert set(vocabulary.REDUCING) == model.REDUCING
        assert vocabulary.OPS == model.REDUCTIONS
        assert all(isinstance(getattr(torch, name), torch.dtype) for name in vocabulary.DTYPES)
        assert {getattr(torch, name) for name in vocabulary.BOUNDED} == set(UNIT)

    def test_topics_are_those_of_requirements(self) -> None:
        """Every topic of a feature is that of a requirement which a suite of its stack has."""
        for stack, features in vocabulary.FEATURES.items():
            ids = _requirements(ROOT / "suites" / stack)
            idle = [(n, t) for n, f in features.items() for t in f.topics if not any(_of(t, i) for i in ids)]
            assert idle == [], stack

    def test_features_of(self) -> None:
        """A topic is whole words of an id."""
        assert vocabulary.features_of("collectives", ["COLL-GROUP-08", "COLL-X-01"]) == ["splitting", "subgroups"]
        assert vocabulary.features_of("collectives", ["COLL-GROUPS-08", "COLL-GROUP-081"]) == ["subgroups"]
        assert vocabulary.features_of("mine", ["COLL-GROUP-08"]) == []


def _of(topic: str, requirement: str) -> bool:
    return vocabulary.Feature("", (topic,)).concerns(requirement)


def _requirements(folder: Path) -> set[str]:
    """The ids in the sources of a suite."""
    trees = [ast.parse(path.read_text()) for path in folder.rglob("*.py")]
    texts = {
        n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
    return {text for text in texts if text.isupper() and text.count("-") >= 2}


class TestClaims:
    CLAIMS = read(
        HEAD + '[collectives]\nnames = ["all_reduce", "broadcast", "reduce"]\ndtypes = ["float32", "int32"]\n'
        'ops = ["SUM", "AVG"]\n'
        '[[collectives.except]]\ndtypes = ["int32"]\nops = ["AVG"]\nreason = "x"\n'
        '[[collectives.except]]\ncollectives = ["reduce"]\nreason = "y"\nmachine = "aarch64"\n'
        '[[collectives.except]]\ncollectives = ["broadcast"]\ndtypes = ["int32"]\nreason = "z"\ntorch = "<2"\n'
    ).claims.on(ARM)

    @pytest.mark.parametrize(
        ("case", "expected"),
        [
            (("all_reduce", "float32", "SUM"), True),
            (("all_reduce", "int32", "SUM"), True),
            (("all_reduce", "int32", "AVG"), False),
            (("all_reduce", "float32", "MAX"), False),
            (("all_reduce", "int8", "SUM"), False),
            (("broadcast", "int32", "MAX"), True),
            (("reduce", "float32", "SUM"), False),
            (("scatter", "float32", ""), False),
        ],
    )
    def test_has(self, case: tuple[str, str, str], expected: bool) -> None:
        """A combination is claimed where its words are and no exception that counts here takes it away."""
        assert self.CLAIMS.has(*case) == expected

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            ({}, ""),
            ({"collective": "reduce"}, "reduce"),
            ({"collective": "barrier"}, ""),
            ({"dtype": "int32"}, ""),
            ({"dtype": "int8"}, "int8"),
            ({"op": "AVG"}, ""),
            ({"op": "MAX"}, "with MAX"),
            ({"dtype": "int32", "op": "AVG"}, "int32 with AVG"),
            ({"collective": "all_reduce", "dtype": "int32", "op": "AVG"}, "all_reduce of int32 with AVG"),
        ],
    )
    def test_lacks(self, asked: dict[str, str], expected: str) -> None:
        """What is left open may be anything that is claimed."""
        assert self.CLAIMS.lacks(**asked) == expected

    def test_everything(self) -> None:
        """Without a word, everything is claimed."""
        claims = read(HEAD).claims
        assert claims == Claims()
        assert claims.has("gather", "complex64")
        assert claims.lacks_features("dynamo", vocabulary.FEATURES["dynamo"]) == ""

    def test_features(self) -> None:
        """Of a stack with a list, only what is in it is claimed; of a stack that is not claimed, nothing is."""
        claims = read(
            HEAD + 'stacks = ["replicate", "dynamo"]\n[features]\nreplicate = ["comm_hooks"]\ndynamo = []'
        ).claims
        assert claims.lacks_features("replicate", ["comm_hooks"]) == ""
        assert claims.lacks_features("replicate", ["static_graph"]) == "feature static_graph of replicate"
        assert claims.lacks_features("dynamo", ["ddp"]) == "feature ddp of dynamo"
        assert claims.lacks_features("dynamo", []) == ""
        assert claims.lacks_features("tp_extension", []) == "the stack tp_extension"
        assert claims.lacks_features("mine", []) == ""


class TestCondition:
    @pytest.mark.parametrize(
        ("condition", "expected"),
        [
            (Condition(), True),
            (Condition(torch=">=2.11", python=">=3.11,<3.12"), True),
            (Condition(python="<3.11"), False),
            (Condition(machine=("x86_64", "aarch*")), True),
            (Condition(machine=("x86_64",)), False),
            (Condition(os=("Linux 5.*",)), False),
            (Condition(os=("Linux 6.*",), device_name=("*H100*",)), True),
            (Condition(device_name=("*H200*",)), False),
        ],
    )
    def test_holds(self, condition: Condition, expected: bool) -> None:
        """Every part of a condition has to hold, and any of its globs."""
        assert condition.holds(ARM) == expected

    def test_of_waivers(self) -> None:
        """A waiver's conditions arrive, a single glob as well as a list."""
        entry = '[[waiver]]\ntests = ["*"]\nreason = "r"\nlink = "unreported"\nexpires = 2027-06-30\n'
        (found,) = read(HEAD + entry + 'machine = "aarch64"\nos = ["Linux *", "X"]\npython = ">=3.11"').waivers
        assert found.when == Condition(python=">=3.11", machine=("aarch64",), os=("Linux *", "X"))


class TestMistakes:
    @pytest.mark.parametrize(
        ("lines", "expected"),
        [
            ("collectives = 3", "4: collectives: a table, begun with [collectives], not 3"),
            ("[colectives]", "4: colectives: no such key; did you mean collectives?"),
            ('[collectives]\nname = ["all_reduce"]', "5: collectives.name: no such key; did you mean names?"),
            (
                '[collectives]\nnames = ["allreduce"]',
                "5: collectives.names: 'allreduce' is not a collective; did you mean all_reduce?",
            ),
            (
                '[collectives]\ndtypes = ["float"]',
                "5: collectives.dtypes: 'float' is not a dtype; did you mean float64?",
            ),
            ('[collectives]\nops = ["sum"]', "5: collectives.ops: 'sum' is not a reduction; did you mean SUM?"),
            ("[collectives]\nops = []", "5: collectives.ops: is empty"),
            (
                "[collectives]\nexcept = 3",
                "5: collectives.except: begin each with [[collectives.except]], in two brackets",
            ),
            ('[[collectives.except]]\nops = ["AVG"]', "4: [[collectives.except]] reason: is missing; write reason = "),
            (
                '[[collectives.except]]\nreason = "r"\n[[collectives.except]]\nreason = "r"\ndtype = ["int8"]',
                "8: [[collectives.except]] dtype: no such key; did you mean dtypes?",
            ),
            (
                '[features]\nreplicate = ["hooks"]',
                "5: features.replicate: 'hooks' is not a feature of replicate; did you mean comm_hooks?",
            ),
            ("[features]\nreplicat = []", "5: features.replicat: no such key; did you mean replicate?"),
            ("[features]\ndynamo = true", "5: features.dynamo: a list in brackets, not True"),
            ("[tolerance.int8]\nfactor = 2.0", "4: tolerance.int8: no such key; "),
            ("[tolerance.bfloat61]\nfactor = 2.0", "4: tolerance.bfloat61: no such key; did you mean bfloat16?"),
            ("tolerance.float16 = 2", "4: tolerance.float16: a table, begun with [tolerance.float16], not 2"),
            (
                '[tolerance.float16]\nfactor = 0.5\nreason = "r"',
                "5: tolerance.float16.factor: a number from 1 to 1000, not 0.5",
            ),
            ("[tolerance.float16]\nfactor = 2", "4: tolerance.float16.reason: is missing; write reason = "),
            ('stacks = ["replicated"]', "4: stacks: 'replicated' is not a stack; did you mean replicate?"),
            ('visible_devices = "A B"', "4: visible_devices: the name of an environment variable, not 'A B'"),
            ('inherits = "other"', "4: inherits: nothing is known of other profiles here"),
            ("inherits = 3", "4: inherits: a text in quotes, not 3"),
        ],
        ids=lambda text: ascii(text)[:40],
    )
    def test_told(self, lines: str, expected: str) -> None:
        """A mistake is told with file, line and key, and with the nearest right word."""
        assert mistake(HEAD + lines).startswith(f"p.toml:{expected}")


class TestInheritance:
    FILES: Mapping[str, str] = {
        "base": 'name = "base"\nbackend = "b"\ndevice = "d"\nworld_sizes = [1, 2]\ntimeout = 9\n'
        'env = { A = "1", B = "1" }\nshared_device_env = { HOST = "h{rank}", LOW = "1" }\n'
        '[collectives]\ndtypes = ["int8"]\nops = ["SUM"]\n[[collectives.except]]\nops = ["SUM"]\nreason = "r"\n'
        '[features]\ndynamo = []\n[tolerance.float16]\nfactor = 2\nreason = "r"\n'
        '[[waiver]]\ntests = ["suites/a/*", "suites/b/*"]\nreason = "w"\nlink = "unreported"\nexpires = 2027-06-30\n',
        "circle": 'name = "circle"\ninherits = "round"\n',
        "round": 'name = "round"\ninherits = "circle"\n',
        "broken": 'name = "broken"\nbakend = "x"\ndevice = "d"\n',
    }

    def base(self, name: str, file: str) -> tuple[str, str]:
        if name not in self.FILES:
            raise ValueError(f"no profile {name}")
        return f"{name}.toml", self.FILES[name]

    def parsed(self, text: str) -> Profile:
        return parse(text, "p.toml", self.base)

    def test_joined(self) -> None:
        """Values and lists of values are replaced, tables joined, lists of tables go on."""
        found = self.parsed(
            'name = "p"\ninherits = "base"\nworld_sizes = [4]\ninherit_waivers = ["suites/b*"]\nenv = { B = "2" }\n'
            'shared_device_env = { LOW = "2" }\n'
            '[collectives]\nops = ["AVG"]\n[[collectives.except]]\nops = ["AVG"]\nreason = "r"\n'
            '[features]\nreplicate = []\n[tolerance.bfloat16]\nfactor = 3\nreason = "r"\n'
        )
        assert (found.name, found.backend, found.device, found.timeout) == ("p", "b", "d", 9.0)
        assert (found.world_sizes, found.env) == ((4,), (("A", "1"), ("B", "2")))
        assert found.shared_device_env == (("HOST", "h{rank}"), ("LOW", "2"))
        assert (found.claims.dtypes, found.claims.ops) == (("int8",), ("AVG",))
        assert [e.ops for e in found.claims.exclusions] == [("SUM",), ("AVG",)]
        assert found.claims.features == (("dynamo", ()), ("replicate", ()))
        assert {t.dtype: t.factor for t in found.tolerances} == {"float16": 2.0, "bfloat16": 3.0}
        assert [(w.tests, w.place) for w in found.waivers] == [(("suites/b/*",), "base.toml:19")]
        assert (found.file, found.bases) == ("p.toml", ("base.toml",))

    def test_no_waivers(self) -> None:
        """An empty list of globs leaves all waivers out; none leaves none out."""
        assert self.parsed('name = "p"\ninherits = "base"\ninherit_waivers = []').waivers == ()
        assert len(self.parsed('name = "p"\ninherits = "base"').waivers) == 1

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("bass", "p.toml:2: inherits: no profile bass"),
            (
                "circle",
                "round.toml:2: inherits: goes round in a circle: p.toml -> circle.toml -> round.toml -> circle.toml",
            ),
            ("broken", "broken.toml:2: bakend: no such key; did you mean backend?"),
        ],
    )
    def test_mistakes(self, name: str, expected: str) -> None:
        """What is wrong is told where it is: here, or in what is inherited."""
        with pytest.raises(ProfileError) as caught:
            self.parsed(f'name = "p"\ninherits = "{name}"')
        assert str(caught.value) == expected

    def test_on_the_shelf(self, tmp_path: Path) -> None:
        """A sibling comes before what is shipped, and one may be called as the one that it goes on from."""
        (tmp_path / "mine.toml").write_text('name = "mine"\ninherits = "cpu-gloo"\n')
        (tmp_path / "cpu-gloo.toml").write_text('name = "cpu-gloo"\ninherits = "cpu-gloo"\ntimeout = 7\n')
        found = Shelf(tmp_path).read(tmp_path / "mine.toml")
        assert (found.backend, found.timeout, len(found.bases)) == ("gloo", 7.0, 2)
        assert len(found.waivers) > 50

    def test_sim(self) -> None:
        """The shipped profile of the sample accelerator has PyTorch's defects, and of gloo's those of its carrier."""
        found = Shelf(ROOT).read(ROOT / "fixtures/profiles/sim.toml")
        assert (found.backend, found.device, found.imports) == ("simccl", "sim", ("concord_sim",))
        assert {w.owner for w in found.waivers} == {"pytorch", "gloo"}
        assert [w.defect for w in found.waivers if w.owner == "gloo"] == ["restart_same_store", "lazy_timeout"]


class TestSchema:
    def test_in_step(self) -> None:
        """The published schema is what the reader's keys make; regenerate it as harness/profiles/schema.py says."""
        assert (ROOT / "docs/schemas/profile.schema.json").read_text() == text()
        jsonschema.Draft202012Validator.check_schema(schema())

    @pytest.mark.parametrize("path", sorted((ROOT / "fixtures/profiles").glob("*.toml")), ids=lambda path: path.stem)
    def test_shipped(self, path: Path) -> None:
        """Shipped profiles are of the schema, and say where it is."""
        first = path.read_text().split("\n")[0]
        assert (path.parent / first.removeprefix("#:schema ")).resolve() == ROOT / "docs/schemas/profile.schema.json"
        assert _errors(path.read_text()) == []

    @pytest.mark.parametrize(
        ("line", "path"),
        [
            ('bakend = "x"', ""),
            ("world_sizes = [0]", "world_sizes.0"),
            ('[collectives]\ndtypes = ["float"]', "collectives.dtypes.0"),
            ('[[collectives.except]]\nops = ["AVG"]', "collectives.except.0"),
            ('[features]\ndynamo = ["hooks"]', "features.dynamo.0"),
            ("[tolerance.float16]\nfactor = 0", "tolerance.float16"),
            ('[[waiver]]\ntests = ["*"]', "waiver.0"),
        ],
    )
    def test_mistakes(self, line: str, path: str) -> None:
        """What the reader refuses is not of the schema either."""
        mistake_or_more = pytest.raises(ProfileError)
        with mistake_or_more:
            read(HEAD + line)
        assert path in _errors(HEAD + line)


def _errors(text: str) -> list[str]:
    """Paths in a profile's text that are not of the schema."""
    document: Any = json.loads(json.dumps(tomllib.loads(text), default=datetime.date.isoformat))
    return [
        ".".join(map(str, e.absolute_path)) for e in jsonschema.Draft202012Validator(schema()).iter_errors(document)
    ]


def requirement(id: str, source: str) -> Requirement:
    return Requirement(id, "It is.", source)


class TestNeeds:
    @pytest.mark.parametrize(
        ("nodeid", "parameters", "requirements", "said", "expected"),
        [
            ("suites/collectives/a.py::t", {}, [], {}, Needs("collectives")),
            (
                "suites/collectives/a.py::t",
                {"op": "SUM", "dtype": torch.int8},
                [requirement("COLL-P2P-01", "torch.distributed.all_reduce")],
                {},
                Needs("collectives", "all_reduce", "int8", "SUM", ("messages",)),
            ),
            (
                "suites/replicate/a.py::t",
                {"collective": "gather", "op": "sub", "dtype": "float16"},
                [requirement("REPL-HOOK-02", "torch.distributed.all_reduce, broadcast")],
                {"features": ("static_graph",), "op": "MAX"},
                Needs("replicate", "gather", "float16", "MAX", ("comm_hooks", "static_graph")),
            ),
            (
                "t.py::t",
                {"collective": "barrier", "dtype": 3},
                [requirement("A-B-01", "torch.distributed.barrier")],
                {},
                Needs(),
            ),
            (
                "t.py::t",
                {},
                [requirement("A-B-01", "torch.distributed.gather: 'in order'")],
                {"collective": "reduce"},
                Needs(collective="reduce"),
            ),
            (
                "suites/perf/a.py::t",
                {"timed": Timed("all_reduce", 8, torch.bfloat16, "MAX"), "world": 2},
                [],
                {},
                Needs("perf", "all_reduce", "bfloat16", "MAX"),
            ),
            (
                "suites/perf/a.py::t",
                {"timed": Timed("gather", 8)},
                [],
                {"dtype": "int8"},
                Needs("perf", "gather", "int8"),
            ),
        ],
    )
    def test_read_off(
        self,
        nodeid: str,
        parameters: dict[str, Any],
        requirements: list[Requirement],
        said: dict[str, Any],
        expected: Needs,
    ) -> None:
        """Needs are read off what a test has; what it says itself comes first."""
        assert needs(nodeid, parameters, requirements, said) == expected

    def test_marks_add_up(self) -> None:
        """Collectives and features of several marks are all needed; of dtypes, ops and names, the nearest mark's."""
        marks = [
            {"collective": "gather", "features": ("strided",), "dtype": "int8"},
            {"collective": "scatter", "features": ("messages", "strided"), "dtype": "bool", "op": "SUM"},
            {"collective": "gather"},
        ]
        found = needs("suites/collectives/a.py::t", {}, [], added_up(marks))
        assert found == Needs("collectives", "gather", "int8", "SUM", ("strided", "messages"), further=("scatter",))
        assert added_up([]) == {"features": (), "further": ()}

    @pytest.mark.parametrize(("dtype", "expected"), [(torch.int8, "int8"), ("int8", "int8"), (None, ""), (3, "")])
    def test_name_of(self, dtype: object, expected: str) -> None:
        """A dtype is torch's, or a name."""
        assert name_of(dtype) == expected

    def test_unclaimed(self) -> None:
        """What is not claimed is named: the stack, a feature, a combination."""
        claims = Claims(stacks=("replicate",), dtypes=("int8",), features=(("replicate", ()),))
        assert Needs("dynamo").unclaimed(claims) == NotClaimed(what="the stack dynamo", stack="dynamo")
        feature = NotClaimed(what="feature comm_hooks of replicate", stack="replicate", feature="comm_hooks")
        assert Needs("replicate", features=("comm_hooks",)).unclaimed(claims) == feature
        int16 = NotClaimed(what="int16", profile="p", dtypes=("int16",))
        assert Needs("replicate", dtype="int16").unclaimed(claims, "p") == int16
        combination = NotClaimed(
            what="all_reduce of int16 with SUM", collective="all_reduce", dtypes=("int16",), op="SUM"
        )
        assert Needs("replicate", "all_reduce", "int16", "SUM").unclaimed(claims) == combination
        assert Needs("replicate", "all_reduce", "int8", "SUM").unclaimed(claims) is None
        assert Needs("replicate").unclaimed(claims) is None
        gather = NotClaimed(what="gather", collective="gather")
        few = Claims(stacks=("collectives",), collectives=("scatter",))
        assert Needs("collectives", "scatter", further=("gather",)).unclaimed(few) == gather
        assert Needs("collectives", further=("scatter",)).unclaimed(few) is None

    def test_of_accelerators(self) -> None:
        """What the host can't have is named; a feature of the same name in another stack is none of that."""
        assert (
            Needs("collectives", features=("strided", "streams")).of_accelerators == "the order of a device's streams"
        )
        assert Needs("collectives", features=("strided",)).of_accelerators == ""
        assert Needs("tp_extension", features=("streams",)).of_accelerators == ""
        assert Needs("mine", features=("streams",)).of_accelerators == ""


class TestObeyed:
    def test_in_force(self) -> None:
        """Claims are in force within the block alone; tolerances are those of the platform."""
        profile = read(
            HEAD + '[tolerance.float16]\nfactor = 2\nreason = "r"\n[tolerance.float32]\nfactor = 3\n'
            'reason = "r"\ntorch = "<2"'
        )
        with obeying(of(profile, ARM)):
            assert in_force().factor(["float16", "float32", "float64"]) == 2.0
            cause = in_force().not_claimed("gather(int8)", ["int8"], "gather", "SUM")
            assert cause == NotClaimed(what="gather(int8)", profile="p", collective="gather", dtypes=("int8",))
            assert in_force().not_claimed("x", [], "reduce", "MAX").op == "MAX"
        assert in_force().factor(["float16"]) == 1.0
        assert of(None, ARM).claims == Claims()

    @pytest.mark.parametrize(
        ("layout", "claims", "expected"),
        [
            (
                Layout("replicate", options=(("hook", "allreduce_hook"),)),
                Claims(features=(("replicate", ()),)),
                "feature comm_hooks of replicate",
            ),
            (Layout("replicate", options=(("hook", ""),)), Claims(features=(("replicate", ()),)), ""),
            (Layout("replicate", options=(("hook", "fp16_compress_hook"),)), Claims(dtypes=("float64",)), "float16"),
            (
                Layout("tp_extension", options=(("strategy", "HYBRID_SHARD"),)),
                Claims(features=(("tp_extension", ()),)),
                "feature hybrid of tp_extension",
            ),
            (Layout("replicate_fsdp"), Claims(exclusions=(Exclusion(dtypes=("float64",)),)), "float64"),
        ],
        ids=lambda value: ascii(value)[:20],
    )
    def test_programs(self, layout: Layout, claims: Claims, expected: str) -> None:
        """What a program needs and is not claimed is named."""
        assert unclaimed(Program(Model((2,), (Linear(2),)), layout), claims) == expected

    def test_bound_is_widened(self) -> None:
        """A factor on a dtype is one on what rounding may do to programs of it, and on nothing else."""
        program = Program(Model((2,), (Linear(2),)), Layout("replicate", 2), dtype="float32", span=0, denominator=3)
        profile = read(HEAD + '[tolerance.float32]\nfactor = 2\nreason = "r"\n')
        plain = truth_of(program)
        with obeying(of(profile, ARM)):
            wide = truth_of(program)
        assert plain.bounded is not None
        assert wide.bounded is not None
        for name, tolerance in plain.bounded.tolerance.items():
            assert torch.equal(2 * tolerance, wide.bounded.tolerance[name])
        assert any(bool((tolerance > 0).any()) for tolerance in plain.bounded.tolerance.values())


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        (pytest.mark.needs("gather"), "has no arguments without a name; it has collective, op, dtype, features, torch"),
        (pytest.mark.needs(collectiv="gather"), "has no argument 'collectiv'; it has collective, "),
        (pytest.mark.needs(collective="gathr"), "collective='gathr': one of all_reduce, "),
        (pytest.mark.needs(torch="gather_single"), "torch='gather_single': a name of PyTorch's, as in "),
        (pytest.mark.needs(torch="os.getpid"), "torch='os.getpid': a name of PyTorch's, as in "),
        (pytest.mark.needs(torch="torch.distributed.gather("), "torch='torch.distributed.gather(': a name of "),
        (pytest.mark.needs(features=("hooks",)), "'hooks' is no feature of replicate; it has buffers, "),
    ],
)
def test_wrong_marks(mark: pytest.MarkDecorator, said: str) -> None:
    """A needs mark with what there is not is one error, with what there is."""
    with pytest.raises(pytest.UsageError, match=re.escape(said)):
        _check("suites/replicate/test_x.py::test_y", mark.mark)


class TestDevices:
    def test_mask(self) -> None:
        """The variable that a profile names is the one that masks devices, and no other."""
        environ = {"A_VISIBLE_DEVICES": "5,6", "MINE": "1,0"}
        assert accelerators("x", 2, environ, "MINE").keys == ("x-1", "x-0")
        assert accelerators("x", 2, environ).keys == ("x-5", "x-6")
        assert accelerators("x", 2, environ, "OTHER").keys == ("x-0", "x-1")

    def test_module_that_is_not_there(self) -> None:
        """A module that should register the device and can't be imported is named, with why."""
        with pytest.raises(DeviceError, match="^no x device: importing nowhere_at_all: ModuleNotFoundError: No module"):
            inventory("x", imports=["nowhere_at_all"])


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("torch.distributed.all_reduce", True),
        ("torch.distributed.all_reduce(async_op)", True),
        ("torch.distributed.all_reduce(asynchronous)", False),
        ("torch.distributed.all_deduce", False),
        ("torch.distributed.fsdp.FSDPModule.unshard", True),
        ("torch.distributed.fsdp.FSDPModule.unshard(async_op)", True),
        ("torch.nn.parallel.DistributedDataParallel(bucket_cap_mb)", True),
        ("torch.nn.parallel.DistributedDataParallel.no_such_method", False),
        ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks", True),
        ("torch.no.such.module", False),
        ("torch._dynamo.config.no_such_setting", False),
        ("torch._dynamo.config.suppress_errors", True),
    ],
)
def test_torch_has(name: str, has: bool) -> None:
    """A name of PyTorch's is found in its module, class or parameters, and in modules that nobody has imported."""
    assert torch_has(name) == has
