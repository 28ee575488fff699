"""Tell what is patched in the megatron-core at hand, what is not, why, and what to do.

Patches this process as a pipeline would, imports what is patched, and looks. With --static nothing is imported or
patched: the sources are read, of the installed megatron-core or of a wheel or unpacked tree, and torch is not needed.

Exit codes: 0, everything that the release needs is patched (--static: would be); 1, something is not; 2, there is
nothing to examine, or it cannot be imported.

--json prints one object. Its keys are stable; new ones may be added, for which `schema` stays 1:

    schema          1
    mode            "live" or "static"
    exit_code       as above
    error           why the exit code is 2; else null
    versions        mcore_patch, python, torch, transformer_engine, wrapt: of the installed distributions, or null
    environment     the variables MCORE_PATCH* that are set
    megatron_core   path (of megatron/core), and what the version's sources say: metadata, package_info (the file beside
                    the code), attribute (of the imported module), stated (the one that counts); or null
    line            the release line, such as "0.14"; null when nothing may be patched
    reason, detail  why `line` is null: a stable code, and a sentence
    native          what upstream does by itself in this line
    notes           sentences on versions that disagree with each other or with the code
    advice          sentences: what to do
    targets         one object per target, in the order in which data flows:
        id, target      its name, and module:qualname
        state           applied, pending, skipped, not-needed, buried, reverted, off (see mcore_patch.status())
        verdict         verified, unverified, skipped, not-needed; null if nothing could be judged
        reason, detail  a stable code, or null, and a sentence
        needed          whether it matters when it is not patched
        position        how many wrappers of others lie on top of ours, or null
        wrappers        the modules of all wrappers, ours included, from the outermost to the innermost
        aliases         other names that were rebound
        holders         names that still hold the unpatched function
        overrides       subclasses with a method of their own
        module_error    why its module cannot be imported; else null
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import platform
import sys
import warnings
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import mcore_patch
from mcore_patch._engine import Reason, TargetStatus
from mcore_patch._engine.gate import Decision, decide
from mcore_patch._engine.source import find_package, package_in
from mcore_patch._engine.versions import Versions, read_versions
from mcore_patch.compat import LINES, TARGETS

_REPORT = "report it at the project's issue tracker, with the output of mcore-patch doctor --json"

ADVICE = {
    Reason.DISABLED: "MCORE_PATCH_DISABLE or MCORE_PATCH_ONLY leaves it out; unset it to have it patched.",
    Reason.RELEASE_ABSENT: "Install megatron-core, or name a tree or wheel file: mcore-patch doctor --static PATH.",
    Reason.RELEASE_NEWER: "Upgrade mcore-patch, or use a release of megatron-core that it covers.",
    Reason.RELEASE_OLDER: "Use a release of megatron-core that mcore-patch covers.",
    Reason.RELEASE_UNKNOWN: f"This megatron-core was changed a lot, or cannot be read: {_REPORT}.",
    Reason.SOURCE_MISSING: "Install megatron-core with its sources.",
    Reason.MODULE_MISSING: f"This megatron-core has moved it: {_REPORT}.",
    Reason.ATTRIBUTE_MISSING: f"This megatron-core has moved it: {_REPORT}.",
    Reason.INHERITED: f"This megatron-core has moved it: {_REPORT}.",
    Reason.NOT_A_FUNCTION: "Something has replaced it by an object of another kind: call apply() before that happens.",
    Reason.SIGNATURE_UNKNOWN: f"This megatron-core calls it in another way: {_REPORT}.",
    Reason.ALREADY_PATCHED: "Two copies of mcore-patch are imported; remove one of them.",
    Reason.REPLACED: "Something replaced it after apply(): call mcore_patch.apply() again after that.",
    Reason.WRAPPER_FAILED: f"This should not happen: {_REPORT}.",
}
"""What to do about a target, or a release, that is not patched."""


@dataclass(frozen=True)
class Target:
    """What is told of one target; the fields are the keys of --json."""

    id: str
    target: str
    state: str
    verdict: str | None
    reason: str | None
    detail: str
    needed: bool
    position: int | None = None
    wrappers: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    holders: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    module_error: str | None = None

    @property
    def is_problem(self) -> bool:
        """Whether the release needs it patched, and it is not and will not be."""
        return self.needed and self.state not in ("applied", "pending", "not-needed")


@dataclass(frozen=True)
class Findings:
    """What is told of all; the fields are the keys of --json."""

    mode: str
    megatron_core: dict[str, str | None] | None
    line: str | None
    reason: str | None
    detail: str
    notes: tuple[str, ...]
    targets: tuple[Target, ...]
    error: str | None = None
    schema: int = 1
    exit_code: int = 0
    native: str | None = None
    advice: tuple[str, ...] = ()
    versions: dict[str, str | None] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mcore-patch doctor``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, whose keys are stable")
    parser.add_argument(
        "--static",
        nargs="?",
        const="",
        metavar="PATH",
        help="import nothing; PATH is a wheel file or an unpacked tree (default: what is installed)",
    )
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="import it before patching, as a pipeline that calls apply() late would; may be repeated",
    )


def run(options: argparse.Namespace) -> int:
    """Examine, print; the module's docstring has the exit codes."""
    # What is logged is told in the findings.
    logging.getLogger("mcore_patch").addHandler(logging.NullHandler())
    if options.static is None:
        findings = _live(options.modules)
    else:
        findings = _static(Path(options.static) if options.static else None)
    findings = _completed(findings)
    print(json.dumps(asdict(findings), indent=2) if options.json else "\n".join(_lines(findings)))
    return findings.exit_code


# ------------------------------------------------------------------------------------------ examining


def _static(path: Path | None, error: str | None = None) -> Findings:
    """Judge the sources: at `path`, or of what would be imported."""
    try:
        package = find_package() if path is None else package_in(path)
    except (OSError, zipfile.BadZipFile) as failure:
        text = str(failure) if isinstance(failure, FileNotFoundError) else f"{path}: {failure}"
        return Findings("static", None, None, None, "", (), (), text)
    versions = read_versions(package, installed=path is None)
    decision = decide(package, versions, list(TARGETS.values()), LINES)
    absent = decision.reason is Reason.RELEASE_ABSENT
    # What the environment leaves out. In this process nothing is there to be patched.
    status = mcore_patch.apply()
    mcore_patch.revert()
    off = {target.id: target for target in status.targets if target.state == "off"}
    return Findings(
        mode="static",
        megatron_core=_megatron(package, versions),
        line=decision.line.name if decision.line else None,
        reason=decision.reason.value if decision.reason else None,
        detail=decision.detail if status.active else "MCORE_PATCH=0: nothing is patched",
        notes=decision.notes,
        targets=() if absent else tuple(_judged(target_id, decision, off.get(target_id)) for target_id in TARGETS),
        error=error or (decision.detail if absent else None),
    )


def _judged(target_id: str, decision: Decision, off: TargetStatus | None) -> Target:
    """What apply() would do with a target; `off`: its status, where the environment leaves it out."""
    target = TARGETS[target_id]
    verdict = decision.verdicts.get(target_id)
    if decision.line is None:
        state, reason, detail = "skipped", decision.reason, decision.detail
    elif verdict is None:  # a target in torch, of which only the signature is checked
        state, reason, detail = "pending", None, "judged when torch is imported"
    else:
        states = {"skipped": "skipped", "not-needed": "not-needed"}
        state, reason, detail = states.get(verdict.kind, "pending"), verdict.reason, verdict.detail
    if off is not None and state == "pending":
        state, reason, detail = off.state, off.reason, off.detail
    kind = verdict.kind if verdict else None
    return Target(target_id, target.path, state, kind, reason.value if reason else None, detail, target.needed)


def _live(modules: Iterable[str]) -> Findings:
    """Patch this process, import every module that has a target, and look."""
    # What megatron-core prints would spoil --json.
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("torch", *modules):
            if failure := _import(name):
                return _static(None, _sentence(name, failure))
        status = mcore_patch.apply()
        if not status.active:
            return replace(_static(None), mode="live")
        if status.reason is Reason.RELEASE_ABSENT:
            return replace(_static(None), mode="live")
        failures: dict[str, str] = {}
        for target in status.targets:
            module = TARGETS[target.id].module
            failure = _import(module) if target.state == "pending" and status.line else None
            if failure and not _is_optional(module, failure):
                return _static(None, _sentence(module, failure))
            if failure:
                failures[target.id] = _sentence(module, failure)
        status = mcore_patch.status()
    package = find_package()
    return Findings(
        mode="live",
        megatron_core=_megatron(package, status.versions),
        line=status.line,
        reason=status.reason.value if status.reason else None,
        detail=status.detail,
        notes=status.notes,
        targets=tuple(_seen(target, failures.get(target.id)) for target in status.targets),
    )


def _import(module: str) -> Exception | None:
    try:
        importlib.import_module(module)
    except Exception as failure:  # whatever a module that is imported may raise
        return failure
    return None


def _sentence(module: str, failure: Exception) -> str:
    return f"cannot import {module}: {type(failure).__name__}: {failure}"


def _is_optional(module: str, failure: Exception) -> bool:
    """Whether megatron-core does without the module, too: a checkpoint format whose library is not installed."""
    return isinstance(failure, ImportError) and ".dist_checkpointing.strategies." in module


def _seen(status: TargetStatus, module_error: str | None) -> Target:
    return Target(
        id=status.id,
        target=status.target,
        state=status.state,
        verdict=status.verdict,
        reason=status.reason.value if status.reason else None,
        detail=status.detail,
        needed=status.needed,
        position=status.position,
        wrappers=_wrappers(status.id),
        aliases=status.aliases,
        holders=status.holders,
        overrides=status.overrides,
        module_error=module_error,
    )


def _wrappers(target_id: str) -> tuple[str, ...]:
    """The modules in which the target's wrappers were written, from the outermost on; not that of the target itself.

    By their globals: a wrapper's `__module__` usually is what it has copied from what it wraps.
    """
    target = TARGETS[target_id]
    held: Any = sys.modules.get(target.module)
    for name in target.qualname.split("."):
        held = vars(held).get(name) if held is not None else None
    modules: list[str] = []
    while held is not None and len(modules) < _DEEPEST:
        held = getattr(held, "__func__", held)
        scope = getattr(held, "__globals__", None) or {"__name__": type(held).__module__}
        modules.append(str(scope["__name__"]))
        held = getattr(held, "__wrapped__", None)
    return tuple(modules[:-1])


_DEEPEST = 100  # a chain of wrappers may, by mistake, be a ring


def _megatron(package: object, versions: Versions) -> dict[str, str | None] | None:
    if package is None and versions.stated is None:
        return None
    path = None if package is None else str(package)
    return {"path": path, **asdict(versions), "stated": versions.stated}


# ------------------------------------------------------------------------------------------- telling


def _completed(findings: Findings) -> Findings:
    """Add what follows from the findings, and what holds for any."""
    problems = [target for target in findings.targets if target.is_problem]
    return replace(
        findings,
        exit_code=2 if findings.error else int(bool(problems)),
        native=next((line.native for line in LINES if line.name == findings.line), None),
        advice=tuple(dict.fromkeys(_advice(findings, problems))),
        versions={
            "mcore_patch": mcore_patch.__version__,
            "python": platform.python_version(),
            "torch": _version("torch"),
            "transformer_engine": _version("transformer_engine"),
            "wrapt": _version("wrapt"),
        },
        environment={name: value for name, value in sorted(os.environ.items()) if name.startswith("MCORE_PATCH")},
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _advice(findings: Findings, problems: list[Target]) -> Iterable[str]:
    if findings.error and findings.error.startswith("cannot import"):
        yield f"Make the import work, or read the sources only: mcore-patch doctor --static. ({findings.error})"
    if findings.reason:
        yield ADVICE[Reason(findings.reason)]
    if any(target.state == "off" and target.reason is None for target in problems):
        yield "MCORE_PATCH=0 switches everything off; unset it to have it patched."
    for target in problems:
        if target.reason:
            yield ADVICE[Reason(target.reason)]
    for target in findings.targets:
        if target.verdict == "unverified":
            yield (
                "Unverified targets are patched, since their signatures are known, but their source is not that of a "
                "release: look at their masters once with MCORE_PATCH_VERIFY=1."
            )
        if target.holders:
            yield f"Call mcore_patch.apply() before these import {target.id}: {', '.join(target.holders)}."
        if overrides := _of_others(target.overrides):
            yield (
                f"{target.id} works in these only where they call super(): {', '.join(overrides)}. "
                "mcore_patch.report() says where their masters came from."
            )
        if target.module_error:
            yield f"{target.id}: {target.module_error}. Nothing to do, unless that format is to be loaded."


def _lines(findings: Findings) -> Iterable[str]:
    yield ", ".join(f"{name} {version or 'not installed'}" for name, version in findings.versions.items())
    if findings.environment:
        yield "Environment: " + ", ".join(f"{name}={value}" for name, value in findings.environment.items())
    if findings.megatron_core is not None:
        yield f"megatron-core: {findings.megatron_core['path']}"
        said = {
            "distribution metadata": findings.megatron_core["metadata"],
            "package_info.py": findings.megatron_core["package_info"],
            "megatron.core.__version__": findings.megatron_core["attribute"],
        }
        yield "  version: " + ", ".join(f"{source} says {version or 'nothing'}" for source, version in said.items())
    if findings.line:
        yield f"  release line: {findings.line}. Upstream by itself: {findings.native}"
    yield from (f"  {note}" for note in findings.notes)
    if findings.detail:
        yield f"  {findings.detail}"
    yield ""
    for target in findings.targets:
        yield from _target_lines(target)
    if findings.advice:
        yield "\nWhat to do:"
        yield from (f"  {sentence}" for sentence in findings.advice)
    yield f"\n{_result(findings)}"


def _target_lines(target: Target) -> Iterable[str]:
    said = target.verdict if target.verdict and target.state in ("applied", "pending") else ""
    because = " ".join(part for part in (target.detail, f"[{target.reason}]" if target.reason else "") if part)
    yield f"  {target.state:10}  {said:10}  {target.id:34}  {because or target.target}"
    if _of_others(target.wrappers):
        yield f"{'':28}wrappers, from the outermost on: {', '.join(target.wrappers)}"
    for title, names in (
        ("also rebound", target.aliases),
        ("still hold the unpatched function", target.holders),
        ("override it", _of_others(target.overrides)),
    ):
        if names:
            yield f"{'':28}{title}: {', '.join(names)}"


def _of_others(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names from other packages than those that every release was checked with."""
    return tuple(name for name in names if name.partition(".")[0] not in _CHECKED_PACKAGES)


_CHECKED_PACKAGES = ("contextlib", "mcore_patch", "megatron", "torch")


def _result(findings: Findings) -> str:
    if findings.error:
        return f"ERROR: {findings.error}"
    needed = [target for target in findings.targets if target.state != "not-needed"]
    problems = [target.id for target in needed if target.is_problem]
    patched = "are patched" if findings.mode == "live" else "would be patched"
    if problems:
        return f"NOT OK: {len(problems)} of {len(needed)} targets are not patched: {', '.join(problems)}"
    return f"OK: all {len(needed)} targets that this release needs {patched}."
