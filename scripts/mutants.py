"""Judges what mutmut left over, and writes docs/mutants.md: the changes of the code that no test notices, and why.

    mutmut run                                  changes one place at a time, and runs the tests that reach it
    python scripts/mutants.py                   runs the second stage on what these let pass; writes the page
    python scripts/mutants.py _engine           only modules with that in their name; what is known of others is kept
    python scripts/mutants.py --again           once more also for those that survived the second stage before

mutmut knows which tests reach a function if they do so in their own process. The second stage is the tests of `STAGES`,
all of them, with the change in the processes that they start as well; only for what has no explanation. Reads mutants/
in the current directory. Verdicts are kept in out/mutants.json, by what was changed and not by mutmut's number, so that
an interrupted run goes on. Every survivor needs an explanation in docs/mutants.toml: exits with 1 if one has none, or
an explanation fits none.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import json
import os
import re
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomllib

ROOT = Path(__file__).resolve().parent.parent
VERDICTS, PAGE, EXPLANATIONS = ROOT / "out/mutants.json", ROOT / "docs/mutants.md", ROOT / "docs/mutants.toml"
MUTANTS = Path("mutants").resolve()
TIMEOUT = 300.0  # seconds that the second stage may take

# By a part of the module's name: what is imported once for all, and what pytest gets. Left out are the races, which
# take long, and what needs an interpreter that has imported nothing.
STAGES = {
    "_engine": (
        ["wrapt", "packaging.version", "zipfile"],
        [
            *("tests/engine/test_rare.py", "tests/engine/test_engine.py", "tests/engine/test_processes.py"),
            *(
                "-k",
                "not race and not another_thread_patches and not eight_threads and not nothing_heavy and not spawned",
            ),
        ],
    ),
    "_stations": (
        ["wrapt", "packaging.version", "torch"],
        ["tests/stations/test_faults.py", "tests/stations/test_any_pipeline.py"],
    ),
}

HEAD = """\
# What the tests do not notice

Every operator, constant, argument and the like of the engine and of the stations was changed, one at a time, by
[mutmut](https://mutmut.readthedocs.io), and the tests were run on each of these mutants (`tox -e mutants`;
`scripts/mutants.py` wrote this page). Those that no test noticed are below, each with the reason why it may stand.
Functions with a decorator, such as properties, are not changed by mutmut.
"""


class Change(NamedTuple):
    """One mutant: the lines that it has instead of others. `place` counts equal changes of one function."""

    module: str
    function: str
    before: str
    after: str
    place: int

    def __str__(self) -> str:
        return textwrap.indent(self.before, "- ", bool) + "\n" + textwrap.indent(self.after, "+ ", bool)


def main() -> int:
    """Judge, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="?", default="", help="only modules with this in their name")
    parser.add_argument("--again", action="store_true", help="judge survivors of the second stage once more")
    options = parser.parse_args()
    known = {Change(*key): verdict for *key, verdict in json.loads(VERDICTS.read_text())} if VERDICTS.exists() else {}
    found = {change: (name, code) for change, name, code in read() if options.modules in change.module}
    verdicts = {change: verdict for change, verdict in known.items() if options.modules not in change.module}
    explanations = tomllib.loads(EXPLANATIONS.read_text())["explanations"]
    left = []
    for change, (name, code) in found.items():
        if code is None and change not in known:
            raise SystemExit(f"mutmut has not run {name}")
        if code not in (0, 5, 33, None):  # survived, or no test reaches it
            verdicts[change] = "timeout" if code in (24, -24, 36, 152, 255) else "killed"
        elif code is not None and any(fits(each, change) for each in explanations):
            verdicts[change] = "survived"
        elif (code is not None and known.get(change) in (None, "killed", "timeout")) or (
            options.again and known[change] == "survived"
        ):
            left.append((change, name))
        else:
            verdicts[change] = known[change]
    VERDICTS.parent.mkdir(exist_ok=True)
    for package in sorted({change.module.rpartition(".")[0] for change, _ in left}):
        if second_stage(package, "no.mutant") != "survived":
            raise SystemExit(f"the second stage of {package} fails by itself: see out/second-stage.log")
    for number, (change, name) in enumerate(left, 1):
        verdicts[change] = second_stage(change.module, name)
        print(f"{number}/{len(left)} {verdicts[change]}: {name}", flush=True)
        keep(known | verdicts)
    keep(verdicts)
    text, failures = page(verdicts, explanations)
    PAGE.write_text(text)
    print(*failures, sep="\n")
    return 1 if failures else 0


def keep(verdicts: dict[Change, str]) -> None:
    """Write out/mutants.json."""
    VERDICTS.write_text(json.dumps([[*change, verdict] for change, verdict in sorted(verdicts.items())], indent=0))


def read() -> Iterator[tuple[Change, str, int | None]]:
    """Yield mutants with their names and the exit codes of mutmut's own run."""
    places: Counter[tuple[str, ...]] = Counter()
    for meta in sorted(MUTANTS.rglob("*.meta")):
        text = meta.with_suffix("").read_text()
        lines = text.splitlines()
        functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        sources = {node.name: lines[node.lineno - 1 : node.end_lineno] for node in functions}
        for name, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            module, _, mangled = name.rpartition(".")
            stem = mangled.rpartition("__mutmut_")[0]
            function = re.sub(r"^x_?", "", stem).strip("ǁ").replace("ǁ", ".")
            old, new = (
                [line.replace(each, function.rpartition(".")[2]) for line in sources[each]]
                for each in (f"{stem}__mutmut_orig", mangled)
            )
            edits = difflib.SequenceMatcher(None, old, new, False).get_opcodes()
            spans = [edit[1:] for edit in edits if edit[0] != "equal"]
            before = textwrap.dedent("\n".join(line for start, end, _, _ in spans for line in old[start:end]))
            after = textwrap.dedent("\n".join(line for _, _, start, end in spans for line in new[start:end]))
            key = (module, function, before, after)
            places[key] += 1
            yield Change(*key, places[key]), name, code


def second_stage(module: str, name: str) -> str:
    """Return the verdict of the tests of `STAGES` on the mutant of that name."""
    imports, tests = next(stage for part, stage in STAGES.items() if part in module)
    for each in imports:
        importlib.import_module(each)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(MUTANTS)  # as mutmut does
        sys.dont_write_bytecode = False
        os.environ |= {"MUTANT_UNDER_TEST": name, "PYTHONPATH": str(MUTANTS), "PYTHONSAFEPATH": "1"}
        sys.path.insert(0, str(MUTANTS))
        for descriptor in (1, 2):
            os.dup2(os.open(ROOT / "out/second-stage.log", os.O_CREAT | os.O_TRUNC | os.O_WRONLY), descriptor)
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
    ends = time.monotonic() + TIMEOUT
    while time.monotonic() < ends:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            if code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
                raise SystemExit("the second stage has no tests: see out/second-stage.log")
            return "killed: second stage" if code else "survived"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout: second stage"


def fits(explanation: dict[str, Any], change: Change) -> bool:
    """Whether an entry of docs/mutants.toml is about that mutant."""
    where = re.fullmatch(explanation["function"], f"{change.module}.{change.function}")
    return bool(where and re.search(explanation["change"], str(change), re.M))


def page(verdicts: dict[Change, str], explanations: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return the page, and what is wrong with the explanations."""
    lines = [
        HEAD,
        "| module | mutants | killed | of these by the second stage | by a timeout | survived |",
        "|---|---|---|---|---|---|",
    ]
    for module in sorted({change.module for change in verdicts}):
        of_it = [verdict for change, verdict in verdicts.items() if change.module == module]
        killed = [verdict for verdict in of_it if verdict != "survived"]
        second, timeouts = (sum(word in verdict for verdict in killed) for word in ("second", "timeout"))
        lines.append(
            f"| `{module}` | {len(of_it)} | {len(killed)} | {second} | {timeouts} | {len(of_it) - len(killed)} |"
        )
    survivors = [change for change, verdict in sorted(verdicts.items()) if verdict == "survived"]
    failures = []
    for number, each in enumerate(explanations):
        fitting = [change for change in survivors if fits(each, change)]
        survivors = [change for change in survivors if change not in fitting]
        if not fitting:
            failures.append(f"explanation {number} fits no survivor: {each}")
        lines += ["", each["why"].strip()]
        for change in fitting:
            lines += ["", f"`{change.module}.{change.function}`", "", "```diff", str(change), "```"]
    return "\n".join(lines) + "\n", failures + [f"no explanation: {c.module}.{c.function}\n{c}" for c in survivors]


if __name__ == "__main__":
    raise SystemExit(main())
