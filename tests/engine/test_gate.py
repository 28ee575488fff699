from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from engine_fakes import FILES, OLDER_FILES, TARGETS, make_lines, write_tree
from mcore_patch.compat import WHY_NO_OLDER, Checked, Quirks, ReleaseLine, Target

from mcore_patch._engine.gate import Decision, Reason, Verdict, decide, find_targets, judge
from mcore_patch._engine.source import Found, package_in
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
    says = ".".join(map(str, version[:3])) + version[3] if version else "nothing"
    note = f"the code is that of megatron-core {line}, its version says {says}"
    assert decision.notes == ((note,) if noted else ())


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
    "version, reason, detail",
    [
        (
            (0, 9, 0, ""),
            Reason.RELEASE_OLDER,
            f"megatron-core 0.9.0 is too old: the covered lines are 0.18 to 0.19; {WHY_NO_OLDER}",
        ),
        (
            None,
            Reason.RELEASE_UNKNOWN,
            "found neither a readable version (none) nor code as in the lines 0.18 to 0.19",
        ),
    ],
)
def test_unknown_code_of_an_uncovered_version_is_refused(
    tmp_path: Path, version: Version, reason: Reason, detail: str
) -> None:
    decision = gate(tmp_path, version, edit=change_everything)
    assert (decision.line, decision.reason, decision.detail, decision.notes) == (None, reason, detail, ())
    assert decision.versions == Versions(package_info=version and "0.9.0")


def test_unknown_code_goes_by_its_version_and_is_unverified(tmp_path: Path) -> None:
    decision = gate(tmp_path, (0, 18, 3, ""), edit=change_everything)
    assert decision.line is not None
    assert decision.line.name == "0.18"
    assert {verdict.kind for verdict in decision.verdicts.values()} == {"unverified"}


def test_without_sources_the_version_decides_and_targets_are_unverified(tmp_path: Path) -> None:
    decision = decide(None, Versions(metadata="0.18.0"), list(TARGETS.values()), make_lines(tmp_path))
    assert decision.line is not None
    assert decision.line.name == "0.18"
    assert set(decision.verdicts.values()) == {Verdict("unverified", None, "its source cannot be read")}


def test_without_megatron_there_is_nothing_to_decide(tmp_path: Path) -> None:
    versions = Versions(attribute="nonsense")
    decision = decide(None, versions, list(TARGETS.values()), make_lines(tmp_path))
    assert decision == Decision(versions, None, Reason.RELEASE_ABSENT, "megatron-core was not found")


EXPECTED = "expected a function at megatron.core.optimizer.optimizer:Optimizer.step"
OTHER_SOURCE = "its source is not that of a megatron-core 0.19 release"

# A letter per target: its fingerprint in the releases of the line.
LETTERS = {"0.18": "ab", "0.19": "acde", "0.20": "bcde"}


@pytest.mark.parametrize(
    "stated, found, name",
    [
        ("0.19.0", "....", "0.19"),  # as much of each: the version decides
        ("0.18.0", "acde", "0.19"),  # more of another than of the version's: the code decides
        ("0.19.0", "ab..", "0.18"),
        (None, "abd.", "0.18"),  # as much of two: the one that has no more than that
        (None, ".cde", "0.20"),  # the newer; more than half of its targets
        (None, ".cd.", None),  # half
        ("0.9.0", ".cde", None),
        ("0.9.0", "acde", "0.19"),
    ],
)
def test_the_line_is_the_one_with_most_of_the_code(stated: str | None, found: str, name: str | None) -> None:
    lines = [
        ReleaseLine(
            each,
            (),
            (),
            "",
            True,
            "",
            Quirks(False, False),
            {str(place): Checked((), {letter: ()}) for place, letter in enumerate(letters)},
        )
        for each, letters in LETTERS.items()
    ]
    of_code = {str(place): Found(None, letter) for place, letter in enumerate(found)}
    decision = judge(of_code, Versions(package_info=stated), [], lines)
    assert (decision.line and decision.line.name) == name
    assert (decision.detail == "") == (name is not None)


def test_versions_that_disagree_are_noted_for_code_of_no_line_too(tmp_path: Path) -> None:
    versions = Versions("0.9.1", "0.9.0")
    assert judge({}, versions, [], make_lines(tmp_path)).notes == (versions.disagreement,)


@pytest.mark.parametrize(
    "edit, kind, reason, detail",
    [
        (replacing("def step(self, value)", "def advance(self, value)"), "skipped", Reason.ATTRIBUTE_MISSING, EXPECTED),
        (
            replacing("def step(self, value)", "def step(self, value, more)"),
            "skipped",
            Reason.SIGNATURE_UNKNOWN,
            "found the signature (self, value, more), expected (self, value)",
        ),
        (
            replacing("def step(self, value)", "def step(self, value=None)"),
            "skipped",
            Reason.SIGNATURE_UNKNOWN,
            "found the signature (self, value=), expected (self, value)",
        ),
        (replacing("self.scale * value", "value * self.scale"), "unverified", None, OTHER_SOURCE),
        (replacing("self.scale * value", "value"), "verified", None, "as in megatron-core 0.18"),
        (lambda texts: texts.pop(OPTIMIZER), "skipped", Reason.MODULE_MISSING, EXPECTED),
        (replacing("@timed\n    def step", "step = None\n    def stop"), "skipped", Reason.NOT_A_FUNCTION, EXPECTED),
        (replacing("class Optimizer(Base)", "class Optimizer(Old)"), "verified", None, ""),
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
            EXPECTED,
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
def test_one_mutated_target_has_its_own_verdict(
    tmp_path: Path, edit: Edit, kind: str, reason: Reason | None, detail: str
) -> None:
    decision = gate(tmp_path, edit=edit)
    assert decision.line is not None
    assert decision.line.name == "0.19"
    assert (decision.reason, decision.detail, decision.notes) == (None, "", ())
    assert decision.verdicts["method"] == Verdict(kind, reason, detail)  # type: ignore[arg-type]
    assert decision.verdicts["function"] == Verdict("verified")


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
    detail = "megatron-core 0.19 needs no patch here"
    assert decision.verdicts["extra"] == Verdict("not-needed", Reason.NOT_IN_LINE, detail)
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
