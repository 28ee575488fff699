"""Drafts the module of a release line, from the wheels or unpacked trees of its releases.

    python scripts/release_line.py 0.20.0=megatron_core-0.20.0-...whl 0.20.1=unpacked/ > compat/v0_20.py

What moved against the nearest known line goes to standard error, with what a person has to judge: signatures,
fingerprints and quirks are read from the releases, all else is copied from that line and has to be corrected. Nothing
of the releases is imported or installed.
"""

from __future__ import annotations

import argparse
import ast
import email
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from mcore_patch.compat import LINES, TARGETS, Checked, ReleaseLine
from packaging.specifiers import SpecifierSet

from mcore_patch._engine.source import Directory, find_target, package_in
from mcore_patch._engine.versions import release_of

Checks = dict[str, Checked]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
_NORMALIZER = ["state_dict_flat", "model_chunk"]
_WIDTH = 120
_DRAFT = "DRAFT, read the releases: "


def main() -> None:
    """Print the draft."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="+", metavar="VERSION=PATH", help="a release and its wheel or tree")
    named = [release.partition("=")[::2] for release in parser.parse_args().releases]
    paths = {version: Path(path) for version, path in sorted(named, key=lambda pair: release_of(pair[0]) or ())}
    names = {".".join(version.split(".")[:2]) for version in paths}
    if len(names) != 1 or not all(release_of(version) for version in paths):
        parser.error(f"found the lines {sorted(names)}, expected releases of one line")
    name = names.pop()
    checks = read(paths)
    nearest = nearest_line(name)
    newest = paths[next(reversed(paths))]
    package = package_in(newest)
    print("\n".join([*moved(checks, nearest), *to_judge(package, nearest)]), file=sys.stderr)
    python = pythons(requires_python(newest))
    print(draft(name, tuple(paths), python, checks, normalizers(package), nearest), end="")


def read(paths: dict[str, Path]) -> Checks:
    """Read every megatron target that the releases have; a release that lacks one is not listed with it."""
    packages = {version: package_in(path) for version, path in paths.items()}
    checks: Checks = {}
    for target in TARGETS.values():
        if target.checked is not None:
            continue
        signatures: dict[str, None] = {}
        fingerprints: dict[str, tuple[str, ...]] = {}
        for version, package in packages.items():
            found = find_target(package, target.module, target.qualname)
            if found.signature and found.fingerprint:
                signatures[found.signature] = None
                fingerprints[found.fingerprint] = (*fingerprints.get(found.fingerprint, ()), version)
        if signatures:
            checks[target.id] = Checked(tuple(signatures), fingerprints)
    return checks


def nearest_line(name: str) -> ReleaseLine | None:
    """Return the line called `name`, else the newest before it, else the oldest."""
    key = tuple(int(part) for part in name.split("."))
    before = [line for line in LINES if line.key <= key]
    return before[-1] if before else next(iter(LINES), None)


def moved(checks: Checks, nearest: ReleaseLine | None) -> Iterator[str]:
    """Yield a sentence for every target that differs from the nearest line."""
    if nearest is None:
        return
    for target_id in {**nearest.targets, **checks}:
        old, new = nearest.targets.get(target_id), checks.get(target_id)
        if old is None or new is None:
            yield f"{target_id}: {'gone since' if new is None else 'new since'} {nearest.name}"
        elif set(new.signatures) - set(old.signatures):
            now, then = ", ".join(new.signatures), ", ".join(old.signatures)
            yield f"{target_id}: signature {now}; {nearest.name} has {then}"
        elif set(new.fingerprints) - set(old.fingerprints):
            yield f"{target_id}: same signature as in {nearest.name}, other source"


def normalizers(package: Directory) -> tuple[str, ...]:
    """Return the static methods of DistributedOptimizer that take a state dict and a model chunk, as they stand there.

    Those that have come so far (0.18, 0.19) rewrite the state dict before parameters are looked up in it.
    """
    text = (package / "optimizer" / "distrib_optimizer.py").read_text(encoding="utf-8")
    methods = [
        method
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and node.name == "DistributedOptimizer"
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    ]
    return tuple(method.name for method in methods if [a.arg for a in method.args.args] == _NORMALIZER)


def optimizers(package: Directory) -> list[str]:
    """Return the names of the classes of megatron.core.optimizer that are called an optimizer."""
    names = set()
    for file in (package / "optimizer").iterdir():
        if file.name.endswith(".py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef) and re.search(r"Optimizer(With\w+)?$", node.name):
                    names.add(node.name)
    return sorted(names)


def to_judge(package: Directory, nearest: ReleaseLine | None) -> Iterator[str]:
    """Yield what cannot be read from one release, a line each."""
    given = f": that of {nearest.name}" if nearest else ""
    yield "To judge, where the draft cannot be right by itself:"
    yield "- targets whose source is another (above): do the wrappers still see what they need? Read, then run tests"
    yield f"- native (a draft{given}): what does upstream do by itself for masters at load, and is a patch superfluous?"
    yield f"- torch (a draft{given}): the newest when the line came out"
    yield "- pythons: Requires-Python allows these; are there wheels for them?"
    yield f"- numpy_2, also_needs (a draft{given}): does it still run with that?"
    yield f"- state_dict_normalizers: are {', '.join(normalizers(package)) or 'none'} called in this order?"
    yield f"- optimizers: {', '.join(optimizers(package))}: is one new to _stations/optimizers.py?"
    yield "- PAIRS: which transformer-engine goes with it, and with which recipes? The draft has none"
    yield "- tests/harness/scenario.py: what has come or gone with the line (formats, sharding types)?"


def requires_python(path: Path) -> str:
    """Return the wheel's Requires-Python, or that of the *.dist-info beside an unpacked package."""
    root = zipfile.Path(path) if path.is_file() else path
    for directory in root.iterdir():
        if directory.name.endswith(".dist-info"):
            metadata = email.message_from_string((directory / "METADATA").read_text(encoding="utf-8"))
            return metadata.get("Requires-Python", "")
    return ""


def pythons(required: str) -> tuple[str, ...]:
    """Return the Pythons of the tests that Requires-Python allows."""
    return tuple(python for python in PYTHONS if python in SpecifierSet(required))


def draft(
    name: str,
    releases: tuple[str, ...],
    pythons: tuple[str, ...],
    checks: Checks,
    normalizers: tuple[str, ...],
    nearest: ReleaseLine | None,
) -> str:
    """Return the module's text, as `ruff format` would lay it out."""
    lines = [
        f'"""What was checked in megatron-core {name}. Drafted by scripts/release_line.py."""',
        "",
        "from __future__ import annotations",
        "",
        "from ._schema import Checked, Quirks, ReleaseLine",
        "",
        "LINE = ReleaseLine(",
        f'    name="{name}",',
        f"    releases={_tuple(releases)},",
        f"    pythons={_tuple(pythons)},",
        f'    torch="{nearest.torch if nearest else ""}",',
        f"    numpy_2={nearest is None or nearest.numpy_2},",
    ]
    native = nearest.native if nearest else ""
    if (nearest is None or nearest.name != name) and not native.startswith(_DRAFT):
        native = f"{_DRAFT}{native}"
    lines += _string("native", native)
    lines += [
        "    quirks=Quirks(",
        f"        reload_accepts_state_dict={_accepts_state_dict(checks)},",
        f"        zarr={'tensorstore_load' in checks},",
        *_names("state_dict_normalizers", normalizers),
        "    ),",
        "    targets={",
    ]
    for target_id, checked in checks.items():
        lines += [
            f'        "{target_id}": Checked(',
            *_signatures(checked.signatures),
            "            fingerprints={",
        ]
        for fingerprint, versions in checked.fingerprints.items():
            lines.append(f'                "{fingerprint}": {_tuple(versions)},')
        lines += ["            },", "        ),"]
    lines.append("    },")
    if nearest is not None and nearest.also_needs:
        lines.append(f"    also_needs={_tuple(nearest.also_needs)},")
    return "\n".join([*lines, ")", ""])


def _accepts_state_dict(checks: Checks) -> bool:
    reload = checks.get("mixed_precision_reload")
    return reload is not None and all("state_dict" in signature for signature in reload.signatures)


def _tuple(items: tuple[str, ...]) -> str:
    return "(" + ", ".join(f'"{item}"' for item in items) + ("," if len(items) == 1 else "") + ")"


def _names(keyword: str, names: tuple[str, ...]) -> list[str]:
    line = f"        {keyword}={_tuple(names)},"
    if len(line) <= _WIDTH:
        return [line]
    return [f"        {keyword}=(", *(f'            "{name}",' for name in names), "        ),"]


def _string(keyword: str, text: str) -> list[str]:
    """Return a keyword argument, its text in parentheses over several lines where it is long."""
    if len(text) + len(keyword) + 8 <= _WIDTH:
        return [f'    {keyword}="{text}",']
    return [f"    {keyword}=(", *(f'        "{part}"' for part in _wrap(text, _WIDTH - 10)), "    ),"]


def _signatures(signatures: tuple[str, ...]) -> list[str]:
    line = f"            signatures={_tuple(signatures)},"
    if len(line) <= _WIDTH:
        return [line]
    lines = ["            signatures=("]
    for signature in signatures:
        if len(signature) + 19 <= _WIDTH:
            lines.append(f'                "{signature}",')
        else:
            parts = [f'                    "{part}"' for part in _wrap(signature, _WIDTH - 22)]
            lines += ["                (", *parts, "                ),"]
    return [*lines, "            ),"]


def _wrap(text: str, width: int) -> Iterator[str]:
    """Yield parts of at most `width` characters, cut after blanks, that join to exactly `text`."""
    while len(text) > width:
        end = text.rindex(" ", 0, width) + 1
        yield text[:end]
        text = text[end:]
    yield text


if __name__ == "__main__":
    main()
