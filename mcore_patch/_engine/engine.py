"""The engine: applies what the gate allows, as modules get imported, and takes it back.

Two locks meet here, Python's import locks and the engine's own, and hooks run under the former. So nothing is
imported under the engine's lock: a wrapper is made outside it, and put in place inside it.
"""

from __future__ import annotations

import logging
import os
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mcore_patch.compat import ReleaseLine, Target

from . import patching
from .gate import Decision, Reason, Verdict, decide, known_signatures
from .imports import finished_module, hold_while_forking, when_imported
from .logs import LOGGER, log
from .source import PACKAGE, Directory, find_package
from .status import PatchError, State, Status, TargetStatus
from .versions import Versions, read_versions

Factory = Callable[[Callable[..., Any], ReleaseLine], Callable[..., Any]]
"""Makes the wrapper of a target from the original and the release line."""

_SWITCH, _DISABLE, _ONLY = "MCORE_PATCH", "MCORE_PATCH_DISABLE", "MCORE_PATCH_ONLY"


class Engine:
    """Patches `targets` with the wrappers of `load_wrappers`, which is called when the first one is needed.

    All methods may be called from any thread, at any time, any number of times.
    """

    def __init__(
        self,
        targets: Mapping[str, Target],
        lines: Sequence[ReleaseLine],
        load_wrappers: Callable[[], Mapping[str, Factory]],
    ) -> None:
        self._targets = targets
        self._lines = lines
        self._load_wrappers = load_wrappers
        self._lock = threading.RLock()
        hold_while_forking(self._lock)
        self._active = self._strict = False
        self._disabled: frozenset[str] = frozenset()
        self._records: dict[str, patching.Record] = {}
        self._verdicts: dict[str, Verdict] = {}  # of targets that were seen alive
        self._reverted: set[str] = set()
        self._hooked: set[str] = set()
        self._logged: set[str] = set()
        self._decisions: dict[Directory | None, Decision] = {}

    # ------------------------------------------------------------------------------------ public

    @property
    def is_strict(self) -> bool:
        """Whether the last apply() was strict."""
        return self._active and self._strict

    def apply(self, *, strict: bool = False, disable: Iterable[str] = (), only: Iterable[str] | None = None) -> Status:
        """Patch what may be patched now, and the rest when its module is imported.

        The last call's choice of targets holds: what it leaves out is taken back. Environment: MCORE_PATCH=0
        switches everything off, whatever the arguments; MCORE_PATCH_DISABLE and MCORE_PATCH_ONLY (ids,
        separated by commas) count where the argument is not given.

        Raises PatchError, if `strict`, with all targets that are needed and cannot be patched; this call has
        then changed nothing.
        """
        if _is_switched_off():
            log(logging.INFO, "%s=0: nothing is patched", _SWITCH)
            self.revert()
            return self.status()
        disabled = self._choose(disable, only)
        with self._lock:
            before = (self._active, self._strict, self._disabled, self._active_records())
            self._active, self._strict, self._disabled = True, strict, disabled
            for target_id in disabled & self._active_records():
                self._take_back(target_id)
        self._register_hooks()
        self._advance()
        status = self.status()
        if strict and status.problems:
            with self._lock:
                self._active, self._strict, self._disabled, installed = before
                for target_id in self._active_records() - installed:
                    self._take_back(target_id)
            self._advance()
            raise PatchError("\n".join(["mcore-patch cannot patch everything:", *status.problems]))
        self._log(status)
        return status

    def revert(self) -> Status:
        """Put every target back as it was found, by identity; hooks that are still waiting do nothing."""
        with self._lock:
            self._active = self._strict = False
            for target_id in self._active_records():
                self._take_back(target_id)
            self._logged.clear()
        return self.status()

    def status(self, *, thorough: bool = True) -> Status:
        """Look at everything anew. Never raises, and imports nothing.

        `thorough` also looks for what escaped: holders and overrides.
        """
        try:
            decision = self._decide()
            with self._lock:
                targets = tuple(self._target_status(target, decision) for target in self._targets.values())
                if thorough:
                    targets = tuple(self._with_escaped(target) for target in targets)
                active = self._active
        except Exception as error:
            LOGGER.exception("mcore-patch cannot tell its status")
            return Status(False, Versions(), None, None, f"{type(error).__name__}: {error}", (), ())
        detail = f"{_SWITCH}=0" if _is_switched_off() else decision.detail
        line = decision.line.name if decision.line else None
        return Status(active, decision.versions, line, decision.reason, detail, decision.notes, targets)

    def examine(self, package: Directory) -> Decision:
        """Judge a tree or wheel (see `source.package_in`) that need not be installed."""
        return decide(package, read_versions(package, installed=False), list(self._targets.values()), self._lines)

    # ------------------------------------------------------------------------------- choosing

    def _choose(self, disable: Iterable[str], only: Iterable[str] | None) -> frozenset[str]:
        """Return the ids that the arguments, or else the environment, switch off. Warns of unknown ids."""
        disabled = set(disable) or _ids_in(_DISABLE)
        chosen = set(only) if only is not None else (_ids_in(_ONLY) or set(self._targets))
        unknown = (disabled | chosen) - set(self._targets)
        if unknown:
            known = ", ".join(self._targets)
            log(logging.WARNING, "unknown targets: %s; known are %s", ", ".join(sorted(unknown)), known)
        return frozenset(self._targets) - chosen | (disabled & set(self._targets))

    def _decide(self) -> Decision:
        """Return the gate's answer for the megatron-core that is, or would be, imported."""
        package = find_package()
        versions = read_versions(package)
        with self._lock:
            known = self._decisions.get(package)
            if known is None or known.versions != versions:
                known = decide(package, versions, list(self._targets.values()), self._lines)
                self._decisions = {package: known}
            return known

    # ----------------------------------------------------------------------------- installing

    def _register_hooks(self) -> None:
        modules = {PACKAGE}
        for target in self._targets.values():
            modules |= {target.module, target.after or target.module}
        with self._lock:
            missing = modules - self._hooked
            self._hooked |= missing
        for name in sorted(missing):
            when_imported(name, self._imported)

    def _imported(self, module: types.ModuleType) -> None:
        """An import hook. What waited for the release line to be known may be ready now, too."""
        if self._active:
            self._advance(module)
            self._log(self.status(thorough=False), summary=False)

    def _advance(self, ended: types.ModuleType | None = None) -> None:
        """Install what is chosen and imported. `ended`: a module at the very end of its import."""
        if not self._active:
            return
        decision = self._decide()
        if decision.line is None:
            return

        def finished(name: str) -> types.ModuleType | None:
            return ended if ended is not None and ended.__name__ == name else finished_module(name)

        for target in self._targets.values():
            module = finished(target.module)
            if module is not None and finished(target.after or target.module) is not None:
                self._install(module, target, decision, decision.line)

    def _install(self, module: types.ModuleType, target: Target, decision: Decision, line: ReleaseLine) -> None:
        verdict = decision.verdicts.get(target.id, Verdict("verified"))
        if not verdict.may_apply or target.id in self._disabled or self._reactivate(target):
            return
        signatures = known_signatures(target, self._lines)
        live = patching.inspect_live(module, target, signatures)
        wrapper = failure = None
        if isinstance(live, patching.Live):
            try:
                wrapper = self._load_wrappers()[target.id](live.function, line)
            except Exception as error:
                LOGGER.debug("the wrapper of %s failed", target.id, exc_info=True)
                detail = f"its wrapper could not be made: {type(error).__name__}: {error}"
                failure = Verdict("skipped", Reason.WRAPPER_FAILED, detail)
        with self._lock:
            if not self._active or target.id in self._disabled or self._reactivate(target):
                return
            now = patching.inspect_live(module, target, signatures)
            refusal = now if isinstance(now, Verdict) else failure
            if refusal is not None:
                self._verdicts[target.id] = refusal
                return
            assert isinstance(now, patching.Live)
            if wrapper is not None and isinstance(live, patching.Live) and live.raw is now.raw:
                self._records[target.id] = patching.install(now, target, wrapper)
                self._verdicts[target.id] = _with_origin(verdict, now)
                return
        self._install(module, target, decision, line)  # somebody patched it meanwhile

    def _reactivate(self, target: Target) -> bool:
        """Whether our wrapper is in place already; if it lies buried under another's, it works again."""
        with self._lock:
            record = self._records.get(target.id)
            if record is None:
                return False
            # What replaced our wrapper may still call it: it must not do its work twice.
            record.active = patching.is_installed(record, target)
            return record.active

    def _take_back(self, target_id: str) -> None:
        """Restore one target; the record stays while its wrapper is buried."""
        if patching.restore(self._records[target_id]) != "buried":
            del self._records[target_id]
        self._reverted.add(target_id)

    def _active_records(self) -> frozenset[str]:
        return frozenset(target_id for target_id, record in self._records.items() if record.active)

    # --------------------------------------------------------------------------------- telling

    def _target_status(self, target: Target, decision: Decision) -> TargetStatus:
        status = TargetStatus(target.id, target.path, "off", needed=target.needed)
        record = self._records.get(target.id)
        installed = record is not None and patching.is_installed(record, target)
        if record is not None and installed:
            status = replace(status, position=record.position, aliases=record.aliases)
            if not record.active:
                return replace(status, state="buried", detail="somebody else's wrapper lies on top")
            verdict = self._verdicts[target.id]
            return replace(status, state="applied", verdict=verdict.kind, detail=verdict.detail)
        if not self._active:
            return replace(status, state="reverted" if target.id in self._reverted else "off")
        if target.id in self._disabled:
            return replace(status, reason=Reason.DISABLED, detail="switched off by the user")
        if decision.line is None:
            state: State = "pending" if decision.reason is Reason.RELEASE_ABSENT else "skipped"
            return replace(status, state=state, reason=decision.reason, detail=decision.detail)
        if record is not None:
            detail = "its wrapper was replaced by somebody else, or the module was reloaded"
            return replace(status, state="skipped", reason=Reason.REPLACED, detail=detail)
        verdict = self._verdicts.get(target.id) or decision.verdicts.get(target.id) or Verdict("verified")
        state = "pending"
        if not verdict.may_apply:
            state = "skipped" if verdict.kind == "skipped" else "not-needed"
        return replace(status, state=state, verdict=verdict.kind, reason=verdict.reason, detail=verdict.detail)

    def _with_escaped(self, status: TargetStatus) -> TargetStatus:
        record = self._records.get(status.id)
        if record is None or status.state != "applied":
            return status
        return replace(status, holders=patching.holders_of(record), overrides=patching.overrides_of(record))

    def _log(self, status: Status, *, summary: bool = True) -> None:
        """Log what was not logged since the last revert(): one line of summary, one warning per problem."""
        lines = [(logging.WARNING, text) for text in (*status.problems, *status.notes)]
        if summary:
            lines.insert(0, (logging.INFO, status.summary()))
        for level, text in lines:
            if text not in self._logged:
                self._logged.add(text)
                log(level, text)


def _with_origin(verdict: Verdict, live: patching.Live) -> Verdict:
    """A function that another tool had put there before us is not the one whose source was read."""
    if live.foreign is None:
        return verdict
    return Verdict("unverified", None, f"what was found and wrapped comes from {live.foreign}")


def _is_switched_off() -> bool:
    return os.environ.get(_SWITCH, "").strip().lower() in ("0", "false", "off")


def _ids_in(variable: str) -> set[str]:
    return {name.strip() for name in os.environ.get(variable, "").split(",")} - {""}
