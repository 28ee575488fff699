from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engine_fakes import FILES, OLDER_FILES, TARGETS, make_lines, write_tree
from mcore_patch.compat import Checked, Target

from mcore_patch._engine.gate import Decision, Reason, decide, find_targets, judge
from mcore_patch._engine.source import package_in
from mcore_patch._engine.versions import Versions, read_versions

Version = tuple[int, int, int, str] | None
Edit = Callable[[dict[str, str]], None]
OPTIMIZER = "megatron/core/optimizer/optimizer.py"


def gate(
    tmp_path: Path, version: Version = (0, 19, 2, ""), files: dict[str, str] = FILES, edit: Edit | None = None
) -> Decision:
    package = package_in(write_tree(tmp_path / "tree", version, files, edit))
    return decide(package, read_versions(package, installed=False), list(TARGETS.values()), make_lines(tmp_path))


def replacing(old: str, new: str) -> Edit:
    def edit(texts: dict[str, str]) -> None:
        assert old in texts[OPTIMIZER]
        texts[OPTIMIZER] = texts[OPTIMIZER].replace(old, new)

    return edit


def change_everything(texts: dict[str, str]) -> None:
    for name, text in texts.items():
        texts[name] = text.replace("return", "pass\n    return" if "serialization" in name else "pass;  return")


@pytest.mark.parametrize(
    "version, files, line, noted",
    [
        ((0, 19, 2, ""), FILES, "0.19", False),
        ((0, 18, 0, ""), OLDER_FILES, "0.18", False),
        ((0, 19, 1, ""), FILES, "0.19", False),
        ((0, 19, 0, "rc0"), FILES, "0.19", False),
        ((0, 18, 0, ""), FILES, "0.19", True),
        ((0, 19, 0, "rc0"), OLDER_FILES, "0.18", True),
        ((0, 9, 0, ""), OLDER_FILES, "0.18", True),
        (None, FILES, "0.19", True),
        (None, OLDER_FILES, "0.18", True),
    ],
)
def test_the_code_tells_the_line_and_the_version_is_a_hint(
    tmp_path: Path, version: Version, files: dict[str, str], line: str, noted: bool
) -> None:
    decision = gate(tmp_path, version, files)
    assert decision.line is not None
    assert decision.line.name == line
    assert {verdict.kind for verdict in decision.verdicts.values()} == {"verified"}
    assert bool(decision.notes) == noted


@pytest.mark.parametrize(
    "version, reason, words",
    [
        ((0, 20, 0, ""), Reason.RELEASE_NEWER, "0.20.0 is newer"),
        ((0, 99, 0, ""), Reason.RELEASE_NEWER, "0.99.0 is newer"),
        ((1, 0, 0, "rc1"), Reason.RELEASE_NEWER, "1.0.0rc1 is newer"),
    ],
)
def test_a_release_from_the_future_patches_nothing_whatever_its_code(
    tmp_path: Path, version: Version, reason: Reason, words: str
) -> None:
    decision = gate(tmp_path, version)
    assert (decision.line, decision.reason, dict(decision.verdicts)) == (None, reason, {})
    assert words in decision.detail


@pytest.mark.parametrize(
    "version, reason, words",
    [
        ((0, 9, 0, ""), Reason.RELEASE_OLDER, "not covered yet"),
        ((0, 5, 0, ""), Reason.RELEASE_OLDER, "no optimizer before 0.6"),
        (None, Reason.RELEASE_UNKNOWN, "neither a readable version"),
    ],
)
def test_unknown_code_of_an_uncovered_version_is_refused(
    tmp_path: Path, version: Version, reason: Reason, words: str
) -> None:
    decision = gate(tmp_path, version, edit=change_everything)
    assert (decision.line, decision.reason) == (None, reason)
    assert words in decision.detail


def test_unknown_code_goes_by_its_version_and_is_unverified(tmp_path: Path) -> None:
    decision = gate(tmp_path, (0, 18, 3, ""), edit=change_everything)
    assert decision.line is not None
    assert decision.line.name == "0.18"
    assert {verdict.kind for verdict in decision.verdicts.values()} == {"unverified"}


def test_without_sources_the_version_decides_and_targets_are_unverified(tmp_path: Path) -> None:
    decision = decide(None, Versions(metadata="0.18.0"), list(TARGETS.values()), make_lines(tmp_path))
    assert decision.line is not None
    assert decision.line.name == "0.18"
    assert {verdict.kind for verdict in decision.verdicts.values()} == {"unverified"}


def test_without_megatron_there_is_nothing_to_decide(tmp_path: Path) -> None:
    decision = decide(None, Versions(), list(TARGETS.values()), make_lines(tmp_path))
    assert (decision.line, decision.reason) == (None, Reason.RELEASE_ABSENT)


@pytest.mark.parametrize(
    "edit, kind, reason",
    [
        (replacing("def step(self, value)", "def advance(self, value)"), "skipped", Reason.ATTRIBUTE_MISSING),
        (
            replacing("def step(self, value)", "def step(self, value, more)"),
            "skipped",
            Reason.SIGNATURE_UNKNOWN,
        ),
        (
            replacing("def step(self, value)", "def step(self, value=None)"),
            "skipped",
            Reason.SIGNATURE_UNKNOWN,
        ),
        (replacing("self.scale * value", "value * self.scale"), "unverified", None),
        (replacing("self.scale * value", "value"), "verified", None),
        (lambda texts: texts.pop(OPTIMIZER), "skipped", Reason.MODULE_MISSING),
        (replacing("@timed\n    def step", "step = None\n    def stop"), "skipped", Reason.NOT_A_FUNCTION),
        (replacing("class Optimizer(Base)", "class Optimizer(Old)"), "verified", None),
        (
            lambda texts: texts.update(
                {
                    OPTIMIZER: texts[OPTIMIZER].replace(
                        "class Optimizer(Base):", "class Optimizer(Old):\n    pass\nclass Old:"
                    )
                }
            ),
            "skipped",
            Reason.INHERITED,
        ),
    ],
    ids=[
        "renamed",
        "added",
        "default",
        "body",
        "older-body",
        "no-module",
        "assigned",
        "other-base",
        "inherited",
    ],
)
def test_one_mutated_target_has_its_own_verdict(tmp_path: Path, edit: Edit, kind: str, reason: Reason | None) -> None:
    decision = gate(tmp_path, edit=edit)
    assert decision.line is not None
    assert decision.line.name == "0.19"
    verdict = decision.verdicts["method"]
    assert (verdict.kind, verdict.reason) == (kind, reason)
    assert decision.verdicts["function"].kind == "verified"


def test_code_between_two_lines_is_judged_by_both(tmp_path: Path) -> None:
    decision = gate(tmp_path, edit=replacing("self.scale * value", "value"))
    assert decision.line is not None
    assert decision.line.name == "0.19"
    assert decision.verdicts["method"].detail == "as in megatron-core 0.18"


def test_a_target_that_the_line_does_not_declare_is_not_needed(tmp_path: Path) -> None:
    package = package_in(write_tree(tmp_path / "tree"))
    extra = Target("extra", "megatron.core.gone", "f", "", "", "")
    outside = Target("outside", "torch", "f", "", "", "", checked=Checked(("()",)))
    targets = [*TARGETS.values(), extra, outside]
    decision = decide(package, Versions(package_info="0.19.2"), targets, make_lines(tmp_path))
    assert (decision.verdicts["extra"].kind, decision.verdicts["extra"].reason) == (
        "not-needed",
        Reason.NOT_IN_LINE,
    )
    assert "outside" not in decision.verdicts


def test_a_target_of_another_line_is_judged_where_the_code_has_it(tmp_path: Path) -> None:
    package = package_in(write_tree(tmp_path / "tree"))
    older, newest = make_lines(tmp_path)
    newest = replace(newest, targets={name: checked for name, checked in newest.targets.items() if name != "method"})
    found = find_targets(package, list(TARGETS.values()))
    decision = judge(found, Versions(package_info="0.19.2"), list(TARGETS.values()), [older, newest])
    assert decision.line is newest
    # Its signature is that of 0.18; its source, from 0.19, is now in no line.
    assert decision.verdicts["method"].kind == "unverified"
