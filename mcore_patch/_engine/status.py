"""What the engine tells about itself: frozen records, of strings, numbers and tuples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .gate import Reason, VerdictKind
from .versions import Versions

State = Literal["applied", "pending", "skipped", "not-needed", "buried", "reverted", "off"]


class PatchError(RuntimeError):
    """`apply(strict=True)` could not patch every target that the release needs, and so changed nothing."""


@dataclass(frozen=True)
class TargetStatus:
    """One target.

    `state`: "pending" waits for its module to be imported; "buried" was reverted under the wrapper of
    somebody else, and passes calls through. `verdict` is None while the gate has not seen the target.
    `position` counts the wrappers of others on top of ours. `aliases` are the other names that were rebound;
    `holders` those that escaped because they were imported from the module earlier; `overrides` the
    subclasses with a method of their own.
    """

    id: str
    target: str
    state: State
    verdict: VerdictKind | None = None
    reason: Reason | None = None
    detail: str = ""
    needed: bool = True
    position: int | None = None
    aliases: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Status:
    """The whole.

    `active`: apply() was called and not reverted. `line` is the release line found, such as "0.14"; None with
    a `reason` if nothing may be patched. `notes` are sentences on versions that disagree.
    """

    active: bool
    versions: Versions
    line: str | None
    reason: Reason | None
    detail: str
    notes: tuple[str, ...]
    targets: tuple[TargetStatus, ...]

    @property
    def applied(self) -> tuple[str, ...]:
        return tuple(target.id for target in self.targets if target.state == "applied")

    @property
    def pending(self) -> tuple[str, ...]:
        return tuple(target.id for target in self.targets if target.state == "pending")

    @property
    def unverified(self) -> tuple[str, ...]:
        """Targets that are or will be patched though their source is not one that was checked."""
        states = ("applied", "pending")
        return tuple(t.id for t in self.targets if t.state in states and t.verdict == "unverified")

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence per needed target that is left unpatched; one in all if the release is not covered."""
        if self.reason is not None and self.reason is not Reason.RELEASE_ABSENT:
            return (f"nothing is patched: {self.detail} [{self.reason.value}]",)
        return tuple(
            f"{t.id} is not patched: {t.detail} ({t.target}) [{t.reason.value if t.reason else ''}]"
            for t in self.targets
            if t.state == "skipped" and t.needed
        )

    def __getitem__(self, target_id: str) -> TargetStatus:
        """Return one target's record by id. Raises KeyError."""
        for target in self.targets:
            if target.id == target_id:
                return target
        raise KeyError(target_id)

    def summary(self) -> str:
        """Return one line for a log."""
        if not self.active:
            return f"not active: {self.detail}" if self.detail else "not active"
        counts: dict[str, int] = {}
        for target in self.targets:
            counts[target.state] = counts.get(target.state, 0) + 1
        states = ", ".join(f"{count} {state}" for state, count in counts.items())
        unverified = f", {len(self.unverified)} of them unverified" if self.unverified else ""
        release = f"megatron-core {self.versions.stated or 'not found'}"
        line = f" (line {self.line})" if self.line else ""
        return f"{release}{line}: {states}{unverified}"
