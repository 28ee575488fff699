"""Copies of a megatron-core with one target changed, as a later release or a fork may have it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mcore_patch.compat import LINES, TARGETS, ReleaseLine, Target

from mcore_patch._engine.gate import Decision, Reason, Verdict, decide
from mcore_patch._engine.source import Directory, package_in, read_module
from mcore_patch._engine.versions import Versions, read_versions

GATED = [target for target in TARGETS.values() if target.checked is None]

MUTATIONS = {
    "renamed": {("skipped", Reason.ATTRIBUTE_MISSING), ("skipped", Reason.INHERITED)},
    "added": {("skipped", Reason.SIGNATURE_UNKNOWN)},
    "body": {("unverified", None)},
    "gone": {("skipped", Reason.MODULE_MISSING)},
}
"""What each does to the target, and what the gate must say of it."""


def file_of(root: Path, module: str) -> Path:
    return root / f"{module.replace('.', '/')}.py"


def copy_read(package: Directory, root: Path) -> None:
    """Copy what the gate reads of a megatron-core."""
    for module in {"megatron.core.package_info", *(target.module for target in GATED)}:
        text = read_module(package, module)
        if text is not None:
            path = file_of(root, module)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)


def judged(root: Path, versions: Versions | None = None) -> Decision:
    package = package_in(root)
    return decide(package, versions or read_versions(package, installed=False), list(TARGETS.values()), LINES)


def mutate(root: Path, target: Target, mutation: str) -> None:
    """Change one target below ``root``."""
    path = file_of(root, target.module)
    if mutation == "gone":
        path.unlink()
        return
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n")
    node = _definition(ast.parse(text), target.qualname.split("."))
    at, name = node.lineno - 1, node.name
    if mutation == "renamed":
        lines[at] = lines[at].replace(f"def {name}(", f"def {name}_as_of_tomorrow(", 1)
    elif mutation == "added":
        lines[at] = lines[at].replace(f"def {name}(", f"def {name}(surprise, ", 1)
    else:
        first = node.body[0]
        assert first.lineno > node.lineno, "a body of its own"
        lines.insert(first.lineno - 1, " " * first.col_offset + "pass")
    changed = "\n".join(lines)
    assert changed != text
    path.write_text(changed, encoding="utf-8")


def _definition(tree: ast.AST, path: list[str]) -> ast.FunctionDef:
    found = [node for node in ast.walk(tree) if getattr(node, "name", None) == path[0]]
    node = found[-1]
    if len(path) > 1:
        return _definition(ast.Module(node.body, []), path[1:])  # type: ignore[attr-defined]
    assert isinstance(node, ast.FunctionDef)
    return node


@contextmanager
def mutated(root: Path, target: Target, mutation: str) -> Iterator[None]:
    path = file_of(root, target.module)
    before = path.read_bytes()
    mutate(root, target, mutation)
    try:
        yield
    finally:
        path.write_bytes(before)


def prove(root: Path, line: ReleaseLine) -> int:
    """Judge a release as it is, and each mutation of each of its targets; return how many judgements were right."""
    whole = judged(root)
    assert whole.line is line
    assert {whole.verdicts[target_id].kind for target_id in line.targets} == {"verified"}
    assert {verdict.kind for verdict in whole.verdicts.values()} <= {"verified", "not-needed"}
    count = 1
    for target_id in line.targets:
        for mutation, answers in MUTATIONS.items():
            with mutated(root, TARGETS[target_id], mutation):
                decision = judged(root)
            assert decision.line is line, (target_id, mutation)
            verdict = decision.verdicts[target_id]
            assert (verdict.kind, verdict.reason) in answers, (target_id, mutation, verdict)
            assert verdict.may_apply or verdict.detail
            for other, found in decision.verdicts.items():
                beside = mutation == "gone" and TARGETS[other].module == TARGETS[target_id].module
                assert beside or other == target_id or _same(found, whole.verdicts[other]), (target_id, mutation, other)
            count += 1
    newer = judged(root, Versions(package_info="0.99.0"))
    assert (newer.line, newer.reason, dict(newer.verdicts)) == (None, Reason.RELEASE_NEWER, {})
    assert "0.99.0 is newer" in newer.detail
    return count + 1


def _same(left: Verdict, right: Verdict) -> bool:
    return (left.kind, left.reason) == (right.kind, right.reason)
