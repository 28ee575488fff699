"""Decides, from what the code is, which release line it belongs to and which targets may be patched.

The version is a hint: containers ship commits between releases, under the version of either neighbour. It
has the last word in one case only: what calls itself newer than every known line is left alone, whatever it
looks like, because nobody has checked how its parts work together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from mcore_patch.compat import WHY_NO_OLDER, ReleaseLine, Target

from .source import Directory, Found, find_target
from .versions import Versions, release_of


class Reason(str, Enum):
    """Why a target is not patched. The values are stable."""

    DISABLED = "disabled"
    RELEASE_ABSENT = "release-absent"
    RELEASE_NEWER = "release-newer"
    RELEASE_OLDER = "release-older"
    RELEASE_UNKNOWN = "release-unknown"
    NOT_IN_LINE = "not-in-line"
    SOURCE_MISSING = "source-missing"
    MODULE_MISSING = "module-missing"
    ATTRIBUTE_MISSING = "attribute-missing"
    INHERITED = "inherited"
    NOT_A_FUNCTION = "not-a-function"
    SIGNATURE_UNKNOWN = "signature-unknown"
    ALREADY_PATCHED = "already-patched"
    REPLACED = "replaced"
    WRAPPER_FAILED = "wrapper-failed"


VerdictKind = Literal["verified", "unverified", "skipped", "not-needed"]


@dataclass(frozen=True)
class Verdict:
    """What may be done with a target.

    `verified`: signature and source are as checked. `unverified`: the signature is, the source is not; still
    applied, since every value that the patches write is checked at run time.
    """

    kind: VerdictKind
    reason: Reason | None = None
    detail: str = ""

    @property
    def may_apply(self) -> bool:
        return self.kind in ("verified", "unverified")


@dataclass(frozen=True)
class Decision:
    """The gate's answer for one copy of megatron-core.

    `line` is None when nothing may be patched; `reason` and `detail` then say why. `notes` are sentences on
    versions that disagree with each other or with the code. `verdicts` holds the megatron targets by id.
    """

    versions: Versions
    line: ReleaseLine | None = None
    reason: Reason | None = None
    detail: str = ""
    notes: tuple[str, ...] = ()
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)


def decide(
    package: Directory | None, versions: Versions, targets: Sequence[Target], lines: Sequence[ReleaseLine]
) -> Decision:
    """Read every target in `package` and judge it. Imports nothing.

    `package` is None where the code cannot be read: the version, and later the live signatures, decide.
    """
    if package is None and versions.stated is None:
        return Decision(versions, reason=Reason.RELEASE_ABSENT, detail="megatron-core was not found")
    return judge(find_targets(package, targets), versions, targets, lines)


def find_targets(package: Directory | None, targets: Sequence[Target]) -> dict[str, Found]:
    """Read every target of megatron-core in `package`; by id."""
    gated = (target for target in targets if target.checked is None)
    return {target.id: find_target(package, target.module, target.qualname) for target in gated}


def judge(
    found: Mapping[str, Found], versions: Versions, targets: Sequence[Target], lines: Sequence[ReleaseLine]
) -> Decision:
    """Judge what was found in one copy of megatron-core."""
    gated = [target for target in targets if target.id in found]
    line, reason, detail = _choose_line(found, versions, lines)
    notes = tuple(note for note in (versions.disagreement, _line_note(line, versions)) if note)
    if line is None:
        return Decision(versions, None, reason, detail, notes)
    verdicts = {target.id: _judge(target, found[target.id], line, lines) for target in gated}
    return Decision(versions, line, None, "", notes, verdicts)


def known_signatures(target: Target, lines: Sequence[ReleaseLine]) -> frozenset[str]:
    """Return every signature of a target that was checked, in any line.

    Any line, because code between two releases has some targets of the older and some of the newer one.
    """
    checks = [target.checked, *(line.targets.get(target.id) for line in lines)]
    return frozenset(signature for check in checks if check for signature in check.signatures)


def _choose_line(
    found: Mapping[str, Found], versions: Versions, lines: Sequence[ReleaseLine]
) -> tuple[ReleaseLine | None, Reason | None, str]:
    """Return the line, or None with the reason and a sentence."""
    stated = versions.stated
    release = release_of(stated)
    covered = f"{lines[0].name} to {lines[-1].name}"
    if release is not None and release[:2] > lines[-1].key:
        detail = f"megatron-core {stated} is newer than the covered lines, {covered}; look for a newer mcore-patch"
        return None, Reason.RELEASE_NEWER, detail

    hinted = next((line for line in lines if release and line.key == release[:2]), None)
    matches = {line.name: _matches(found, line) for line in lines}
    # Most equal fingerprints; among equals fewest unequal, then the newer.
    best = max(lines, key=lambda line: (matches[line.name], -len(line.targets), line.key))
    count, whole = matches[best.name], len(best.targets)
    if hinted is not None:
        return (best if count > matches[hinted.name] else hinted), None, ""
    if count == whole or (release is None and count * 2 > whole):
        return best, None, ""
    if release is None:
        detail = f"found neither a readable version ({stated or 'none'}) nor code as in the lines {covered}"
        return None, Reason.RELEASE_UNKNOWN, detail
    detail = f"megatron-core {stated} is too old: the covered lines are {covered}; {WHY_NO_OLDER}"
    return None, Reason.RELEASE_OLDER, detail


def _matches(found: Mapping[str, Found], line: ReleaseLine) -> int:
    return sum(
        target_id in found and found[target_id].fingerprint in checked.fingerprints
        for target_id, checked in line.targets.items()
    )


def _line_note(line: ReleaseLine | None, versions: Versions) -> str | None:
    release = release_of(versions.stated)
    if line is None or (release is not None and release[:2] == line.key):
        return None
    return f"the code is that of megatron-core {line.name}, its version says {versions.stated or 'nothing'}"


def _judge(target: Target, found: Found, line: ReleaseLine, lines: Sequence[ReleaseLine]) -> Verdict:
    # A commit between two lines may have what only the other one's releases have.
    if target.id not in line.targets and found.signature is None:
        return Verdict("not-needed", Reason.NOT_IN_LINE, f"megatron-core {line.name} needs no patch here")
    if found.problem == "source-missing":
        # An installation without sources. The live signature is still checked before anything is patched.
        return Verdict("unverified", None, "its source cannot be read")
    if found.problem is not None:
        return Verdict("skipped", Reason(found.problem), f"expected a function at {target.path}")
    signatures = known_signatures(target, lines)
    if found.signature not in signatures:
        return Verdict("skipped", Reason.SIGNATURE_UNKNOWN, signature_detail(found.signature, signatures))
    known_in = next((other for other in (line, *reversed(lines)) if _has_fingerprint(other, target.id, found)), None)
    if known_in is None:
        return Verdict("unverified", None, f"its source is not that of a megatron-core {line.name} release")
    return Verdict("verified", None, "" if known_in is line else f"as in megatron-core {known_in.name}")


def _has_fingerprint(line: ReleaseLine, target_id: str, found: Found) -> bool:
    checked = line.targets.get(target_id)
    return checked is not None and found.fingerprint in checked.fingerprints


def signature_detail(found: str | None, expected: frozenset[str]) -> str:
    """Return the sentence on an unknown signature."""
    return f"found the signature {found}, expected {' or '.join(sorted(expected))}"
