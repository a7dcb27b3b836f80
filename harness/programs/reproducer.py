"""Reproducers: a program that failed as one file that needs only torch, to be run with torchrun.

The file has the program's source, the definitions that it stands on, and a main function that trains alone and on ranks
and compares.  It exits with 1 and prints expected and observed values where the defect is there, and with 0 where not.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import torch

from harness.devices import backend_for
from harness.programs import prelude
from harness.programs.check import Truth
from harness.programs.definitions import definitions, module_of, names_in
from harness.programs.literals import literal, name
from harness.programs.options import promises_of
from harness.programs.source import source
from harness.programs.spec import Program
from harness.programs.stored import dumps
from harness.redaction import recorded, redacted
from harness.safe_io.shown import printable
from harness.safe_io.writing import own_folder, write_whole
from harness.stacks import training
from harness.stacks.registry import stack_of
from harness.subjects import TORCH

FOLDER = "CONCORD_REPRODUCERS"
"""Environment variable that names the folder; reports/out/reproducers is the default."""

_PASSED_ON = ("GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "TORCH_FR_BUFFER_SIZE")

_MAIN = '''
def judge(party, alone, seen):
    """What is wrong on this rank, a sentence each."""
    problems = []
    for name, found in seen.items():
        if name not in alone:
            if not (ZEROS_ALLOWED and not found.any()):
                problems.append(f"{{name}}: one device has none, observed {{found}}")
            continue
        expected = alone[name]
        if name.endswith(": output"):
            expected = expected.tensor_split(party.parts)[party.part]
        if found.shape != expected.shape:
            problems.append(f"{{name}}: expected shape {{tuple(expected.shape)}}, observed {{tuple(found.shape)}}")
            continue
        if ALLOWED is not None and name not in ALLOWED:
            continue  # rounded, and within what rounding explains when this file was written
        allowed = 0.0
        if ALLOWED is not None:
            allowed = torch.tensor(ALLOWED[name], dtype=torch.float64).view(alone[name].shape)
            if name.endswith(": output"):
                allowed = allowed.tensor_split(party.parts)[party.part]
        apart = (found.double() - expected.double()).abs()
        wrong = ~(apart <= allowed)
        if wrong.any():
            values = f"\\n  expected {{expected}}\\n  observed {{found}}"
            problems.append(f"{{name}}: {{int(wrong.sum())}} of {{wrong.numel()}} elements differ{{values}}")
    problems += [f"{{name}}: there is none" for name in PROMISED if name in alone and name not in seen]
    return problems


def agree(party, seen):
    """What ranks have in other bits than rank 0, or count otherwise."""
    bits = {{}}
    for name, tensor in seen.items():
        if "output" not in name and tensor.numel():
            bits[name] = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    everyone = [None] * party.world
    dist.all_gather_object(everyone, (bits, party.launched, party.graphs))
    first = everyone[0]
    problems = [f"{{n}}: other bits than on rank 0" for n in bits if first[0].get(n) != bits[n]]
    for name, launched in party.launched.items():
        for group, count in launched.items():
            counts = [everyone[rank][1].get(name, {{}}).get(group, 0) for rank in group]
            if len(set(counts)) > 1:
                problems.append(f"{{name}}: ranks {{group}} launched different numbers of collectives: {{counts}}")
            if NOTHING_UNSYNCED and ", unsynced" in name:
                problems.append(f"{{name}}: {{count}} collectives, though gradients are not to be synchronised")
        if SOME_SYNCED and ", synced" in name and not launched:
            problems.append(f"{{name}}: no collective, though gradients are to be synchronised")
    if COMPILED and (not party.graphs or (SAME_SHAPES and party.graphs != first[2])):
        problems.append(f"compiled graphs of {{party.graphs}} nodes, rank 0 of {{first[2]}}")
    return problems


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != {world}:
        sys.exit(f"this needs {world} ranks: torchrun --nproc-per-node={world} {{sys.argv[0]}}")
    faulthandler.dump_traceback_later({limit}, exit=True)  # a hang is a defect, too: it exits with 1
    one = Party()
    alone = train(one, build(one))  # before there are process groups, or a defect that looks for them would be in it
    dist.init_process_group({backend}, timeout=datetime.timedelta(seconds={limit} // 2))
    device = torch.device("cpu") if {device} == "cpu" else torch.device({device}, int(os.environ["LOCAL_RANK"]))
    party = Party(dtype=torch.{dtype}, device=device, index=rank, world=world, part={part}, parts={parts})
    seen = train(party, distribute(party, build(party)))
    problems = judge(party, alone, seen) + agree(party, seen)
    for problem in problems:
        print(f"rank {{rank}}: {{problem}}", flush=True)
    if not problems:
        print(f"rank {{rank}}: as on one device", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(1 if problems else 0)


if __name__ == "__main__":
    main()
'''


def reproducer(
    program: Program,
    *,
    what: str,
    truth: Truth | None = None,
    backend: str = "",
    device: str = "cpu",
    subject: str = "torch",
    limit: int = 120,
) -> str:
    """The text of a file that shows how a program fails.

    ``what``: what was seen, for the head of the file; ``truth``: what the single device said, None where ranks did not
    get far enough to be compared; ``backend``: torch's own for the device, where it is empty; ``subject``: whose stacks
    it was seen with; ``limit``: seconds after which a hang is called one.
    """
    backend = backend or backend_for(device)
    text = source(program)
    stack, promises = stack_of(program.layout), promises_of(program)
    part = f"(rank // {literal(program.layout.tensor)} + {literal(program.rotated)}) % {literal(program.parts)}"
    main = _MAIN.format(
        world=literal(program.layout.world),
        limit=literal(limit),
        backend=repr(str(backend)),
        device=repr(str(device)),
        dtype=name(program.dtype),
        part=part,
        parts=literal(program.parts),
    )
    facts = {
        "ALLOWED": _allowed(truth, what),
        "ZEROS_ALLOWED": promises.zeros_for_unused,
        "PROMISED": sorted(
            {
                line.split(": there is none")[0].split(": ", 1)[-1]
                for line in what.splitlines()
                if ": there is none" in line
            }
        ),
        "SOME_SYNCED": program.layout.world > program.layout.tensor,
        "NOTHING_UNSYNCED": not promises.unsynced_collectives and program.layout.tensor == 1,
        "COMPILED": program.layout.compiled is not None,
        "SAME_SHAPES": program.even,
    }
    constants = "\n".join(f"{name} = {value!r}" for name, value in facts.items())
    constants = (
        f"# Absolute differences that rounding explains, by name; None where every bit must be right.\n{constants}"
    )
    standing_on = definitions([training, module_of(stack.apply), prelude], names_in(text) | names_in(main))
    imports = "import datetime\nimport faulthandler\nimport os\nimport sys\n"
    head = _head(program, what, backend, subject)
    return "\n\n".join([head, imports + standing_on, text, constants, main.strip()]) + "\n"


def write(
    program: Program, name: str, *, what: str, truth: Truth | None, backend: str, device: str, subject: str = "torch"
) -> tuple[Path, str]:
    """Write ``repro_<name>.py`` and the program beside it, as JSON; returns the file, and the command that runs it."""
    folder = Path(os.environ.get(FOLDER) or Path("reports") / "out" / "reproducers")
    file = own_folder(folder) / f"repro_{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')[:100]}.py"
    text = reproducer(program, what=what, truth=truth, backend=backend, device=device, subject=subject)
    write_whole(file, text, follow=False)
    write_whole(file.with_suffix(".json"), dumps(program), follow=False)
    return file, shlex.join(["torchrun", f"--nproc-per-node={program.layout.world}", str(file)])


def _allowed(truth: Truth | None, what: str) -> dict[str, list[float]] | None:
    """Tolerances of what differed; None where bits must be right."""
    if truth is None or truth.bounded is None:
        return None
    return {n: t.flatten().tolist() for n, t in truth.bounded.tolerance.items() if f"{n}:" in what}


def _head(program: Program, what: str, backend: str, subject: str) -> str:
    lines = [f"A training run that is not on {program.layout.world} ranks what it is on one device.", ""]
    lines += [f"    torchrun --nproc-per-node={program.layout.world} {{this file}}", "", "What was seen:", ""]
    lines += [f"    {line[:200]}" for line in printable(redacted(what)).splitlines()[:20]]
    environment: Mapping[str, str] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": backend,
        "subject": subject,
        **{name: shown for name in _PASSED_ON if (shown := recorded(name, os.environ.get(name, "")))},
    }
    if subject != TORCH:
        lines += [
            "",
            f"It was seen on the subject {subject!r}.  This file runs on the stacks of torch: it tells whether",
        ]
        lines += ["they have the same defect."]
    lines += ["", "Environment:", "", *(f"    {key}: {value}" for key, value in environment.items())]
    # Whatever it says, a comment is a comment: a line has no end but its own.
    return "\n".join(f"# {printable(line).replace(chr(10), ' ')}".rstrip() for line in lines)


def name_of_test() -> str:
    """Of the test that is running, as pytest tells it; ``program`` outside of one."""
    return os.environ.get("PYTEST_CURRENT_TEST", "program").split(" ")[0].removeprefix("suites/")


__all__ = ["FOLDER", "name_of_test", "reproducer", "write"]
