"""Keeps what the test runs said: docs/ran.json, from the reports of the environments.

    tox run-parallel && tox -m wide           every environment writes its report to out/ran/ENVIRONMENT.xml
    python scripts/ran.py out/ran             read the reports; write docs/ran.json and docs/what-was-run.md

An environment's report replaces what was kept of it, so the runs may come one by one; what was kept of environments
that are no longer in tox.ini is dropped. Reports of runs with arguments of their own (`tox -e NAME -- -k word`) say
less than the environment does: run it whole before. Exits with 1 if a test failed; the table then says so.
"""

from __future__ import annotations

import argparse
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mcore_patch.compat import PAIRS
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
FACTS, TABLE = ROOT / "docs" / "ran.json", ROOT / "docs" / "what-was-run.md"

# What tests/conftest.py tells of an environment.
INSTALLED = ("python", "torch", "numpy", "wrapt", "packaging")

# The environments that have a column; of the others only the sums are kept.
_COLUMN = re.compile(r"py\d+-mcore(?P<mcore>[\d.]+)(-te(?P<te>[\d.]+)-fp8)?(?P<wide>-wide)?")

# How a test of tests/fp8 names, in its parameters, what FusedAdam or the parameters hold.
FP8 = {recipe: f"fp8, {recipe}" for pair in PAIRS for recipe in pair.recipes} | {
    "fp32": "masters in FusedAdam, fp32",
    "fp16": "masters in FusedAdam, fp16",
    "remainders": "masters in FusedAdam, remainders",
}


@dataclass
class Cell:
    """How often something came out: cases that passed, that failed, and those that were not run, by reason."""

    passed: int = 0
    failed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        """For the table, without reasons."""
        return f"**{self.failed} FAILED**, {self.passed}" if self.failed else str(self.passed or "")


@dataclass
class Environment:
    """One environment's run: the day, what was installed, and a cell by "module | behaviour | optimizer | format"."""

    day: str
    installed: dict[str, str]
    cells: dict[str, Cell]

    def total(self) -> Cell:
        """The sum of all cells."""
        total = Cell()
        for cell in self.cells.values():
            total.passed += cell.passed
            total.failed += cell.failed
            for reason, count in cell.reasons.items():
                total.reasons[reason] = total.reasons.get(reason, 0) + count
        return total


def report(path: Path) -> Environment:
    """Read a report as pytest writes it with --junitxml."""
    [suite] = ElementTree.parse(path).getroot().iter("testsuite")
    cells: dict[str, Cell] = {}
    for case in suite.iter("testcase"):
        module = "/".join(part for part in case.get("classname", "").split(".") if part != "tests")
        name, _, parameters = case.get("name", "").partition("[")
        said = {each.get("name"): each.get("value", "") for each in case.iter("property")}
        fp8 = [FP8[part] for part in parameters.rstrip("]").split("-") if part in FP8 and module.startswith("fp8")]
        behaviour = name.removeprefix("test_").replace("_", " ")
        kind = (module, behaviour, said.get("optimizer", ""), said.get("format") or ", ".join(fp8))
        cell = cells.setdefault(" | ".join(kind), Cell())
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            cell.failed += 1
        elif skipped is not None:
            reason = skipped.get("message", "")
            cell.reasons[reason] = cell.reasons.get(reason, 0) + 1
        else:
            cell.passed += 1
    said = {each.get("name"): each.get("value", "") for each in suite.findall("./properties/property")}
    installed = {name: said[name] for name in INSTALLED if name in said}
    return Environment(suite.get("timestamp", "")[:10], installed, cells)


def read() -> dict[str, Environment]:
    """What was kept, by the name of the environment."""
    if not FACTS.exists():
        return {}
    kept = json.loads(FACTS.read_text())
    return {
        name: Environment(each["day"], each["installed"], {kind: Cell(*cell) for kind, cell in each["cells"].items()})
        for name, each in kept.items()
    }


def text(ran: dict[str, Environment]) -> str:
    """docs/ran.json: a cell a line, as [passed, failed, {reason: count}]."""
    environments = []
    for name, each in ran.items():
        cells = [f"   {json.dumps(kind)}: {json.dumps([*asdict(cell).values()])}" for kind, cell in each.cells.items()]
        head = f'  "day": {json.dumps(each.day)},\n  "installed": {json.dumps(each.installed)},\n  "cells": {{\n'
        environments.append(f" {json.dumps(name)}: {{\n{head}" + ",\n".join(cells) + "\n  }\n }")
    return "{\n" + ",\n".join(environments) + "\n}\n"


HEAD = """<!-- Generated by scripts/generate.py from docs/ran.json, see scripts/ran.py. Do not edit. -->
# What was run

A number counts the cases that passed. A letter stands for a reason, at the end, for which other cases are not
applicable to the release, or, in parentheses, were skipped because something is not installed. An empty cell was not in
the runs that were kept: the runs of every day take fewer tests on most releases than `tox -m wide`.

"""


def page(ran: dict[str, Environment]) -> str:
    """docs/what-was-run.md."""
    reasons = Reasons()
    return (
        HEAD
        + "## Environments\n\n"
        + _environments(ran, reasons)
        + "\n## Releases of megatron-core\n\n"
        + _matrix(_columns(ran, fp8=False), reasons)
        + "\n## Pairs with Transformer Engine\n\nParameters and masters over stand-ins for compiled kernels.\n\n"
        + _matrix(_columns(ran, fp8=True), reasons)
        + "\n## Why some cases were not run\n\n"
        + "".join(f"* {letter}: {reason}\n" for reason, letter in reasons.letters.items())
    )


class Reasons:
    """Letters for reasons, in the order in which they come up."""

    def __init__(self) -> None:
        self.letters: dict[str, str] = {}

    def __call__(self, reasons: Iterable[str]) -> str:
        """Return the letters of some reasons; in parentheses where something is missing on the machine."""
        marks = []
        for reason in reasons:
            index = len(self.letters)
            letter = self.letters.setdefault(reason, chr(97 + index % 26) * (1 + index // 26))
            marks.append(f"({letter})" if reason.endswith("not installed") else letter)
        return " ".join(marks)


def _environments(ran: dict[str, Environment], reasons: Reasons) -> str:
    rows = [["environment", "on", *INSTALLED, "passed", "not applicable or skipped"]]
    for name, each in ran.items():
        total = each.total()
        installed = [each.installed.get(column, "") for column in INSTALLED]
        rows.append([name, each.day, *installed, str(total), str(sum(total.reasons.values()) or "")])
    return _table(rows)


def _columns(ran: dict[str, Environment], *, fp8: bool) -> dict[str, Environment]:
    """The run of every release, or of every pair; the wide one where there is one."""
    found = {}
    for name, each in ran.items():
        match = _COLUMN.fullmatch(name)
        if match and bool(match["te"]) is fp8:
            column = f"{match['mcore']} + {match['te']}" if fp8 else match["mcore"]
            if match["wide"] or column not in found:
                found[column] = each
    return dict(sorted(found.items(), key=lambda item: [Version(part) for part in item[0].split(" + ")]))


def _matrix(columns: dict[str, Environment], reasons: Reasons) -> str:
    """Rows: behaviour, optimizer and format; columns: what was installed."""
    kinds = dict.fromkeys(kind for each in columns.values() for kind in each.cells)
    rows = [["behaviour", "optimizer", "format", *columns]]
    for kind in sorted(kinds):
        cells = [each.cells.get(kind, Cell()) for each in columns.values()]
        rows.append([*kind.split(" | ")[1:], *(f"{cell} {reasons(cell.reasons)}".strip() for cell in cells)])
    return _table(rows)


def _table(rows: list[list[str]]) -> str:
    head, *rest = (f"| {' | '.join(row)} |\n" for row in rows)
    return head + "|---" * len(rows[0]) + "|\n" + "".join(rest)


def main() -> int:
    """Read reports, and write both files."""
    from generate import environments

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", help="folders with the reports")
    folders: list[Path] = parser.parse_args().reports
    ran = read()
    new = {path.stem: report(path) for folder in folders for path in sorted(folder.glob("*.xml"))}
    for name, each in new.items():
        if not _COLUMN.fullmatch(name):
            each.cells = {"all": each.total()}
    kept = {**ran, **new}
    kept = {name: kept[name] for name in environments() if name in kept}
    FACTS.write_text(text(kept))
    TABLE.write_text(page(kept))
    for name, each in new.items():
        print(f"{name}: {each.total()} passed" + ("" if name in kept else "; not in tox.ini, forgotten"))
    print(f"{len(new)} reports read, {len(kept)} environments kept")
    return 1 if any(each.total().failed for each in new.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
