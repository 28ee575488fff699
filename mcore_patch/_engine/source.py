"""Reads a target's signature and fingerprint from source text. Nothing of what is read is imported."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

PACKAGE = "megatron.core"

Directory = Path | zipfile.Path
"""The directory of the package `megatron.core`: on disk or inside a wheel."""

Problem = Literal["source-missing", "module-missing", "attribute-missing", "inherited", "not-a-function"]

_Parameter = tuple[str, inspect._ParameterKind, bool]


@dataclass(frozen=True)
class Found:
    """What the source says of one target: a signature and a fingerprint, or the problem."""

    signature: str | None = None
    fingerprint: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True)
class _File:
    """The functions of one file by qualified name, and the base names of its classes."""

    functions: Mapping[str, Found]
    classes: Mapping[str, tuple[str, ...]]
    others: frozenset[str]


# --------------------------------------------------------------------------------------- signatures


def signature_of(function: object) -> str:
    """Return the normal form of a live callable's signature. Raises as `inspect.signature` does."""
    assert callable(function)
    parameters = inspect.signature(function).parameters.values()
    return _render((p.name, p.kind, p.default is not p.empty) for p in parameters)


def _signature_in(arguments: ast.arguments) -> str:
    positional = [
        *((argument, inspect.Parameter.POSITIONAL_ONLY) for argument in arguments.posonlyargs),
        *((argument, inspect.Parameter.POSITIONAL_OR_KEYWORD) for argument in arguments.args),
    ]
    required = len(positional) - len(arguments.defaults)
    parameters: list[_Parameter] = [
        (argument.arg, kind, index >= required) for index, (argument, kind) in enumerate(positional)
    ]
    if arguments.vararg:
        parameters.append((arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL, False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append((argument.arg, inspect.Parameter.KEYWORD_ONLY, default is not None))
    if arguments.kwarg:
        parameters.append((arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD, False))
    return _render(parameters)


def _render(parameters: Iterable[_Parameter]) -> str:
    """Write names, kinds and "has a default"; neither annotations nor values, which may differ harmlessly."""
    parts: list[str] = []
    positional_only = starred = False
    for name, kind, has_default in parameters:
        if positional_only and kind is not inspect.Parameter.POSITIONAL_ONLY:
            parts.append("/")
        positional_only = kind is inspect.Parameter.POSITIONAL_ONLY
        if kind is inspect.Parameter.VAR_POSITIONAL:
            starred = True
            name = f"*{name}"
        elif kind is inspect.Parameter.VAR_KEYWORD:
            name = f"**{name}"
        elif kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            starred = True
            parts.append("*")
        parts.append(f"{name}=" if has_default else name)
    if positional_only:
        parts.append("/")
    return f"({', '.join(parts)})"


# ------------------------------------------------------------------------------------- fingerprints


def _fingerprint(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Hash the text of a definition, decorators included, less its indentation and trailing blanks.

    Text and not `ast.dump`, whose form differs between Python versions.
    """
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    indent = node.col_offset
    text = "\n".join(
        (line[indent:] if not line[:indent].strip() else line).rstrip() for line in lines[first - 1 : node.end_lineno]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------ reading


def find_package() -> Path | None:
    """Return the directory of `megatron.core` that an import would use, or has used; None if there is none.

    `megatron` is a namespace package (PEP 420) with, possibly, several portions. Only its own spec is looked
    up: a look-up of `megatron.core` would import the namespace.
    """
    core = sys.modules.get(PACKAGE)
    if core is not None:
        portions = [str(Path(entry).parent) for entry in getattr(core, "__path__", ())]
    else:
        try:
            spec = importlib.util.find_spec("megatron")
        except (ImportError, ValueError):  # ValueError: a stand-in in sys.modules without a spec
            return None
        portions = list(spec.submodule_search_locations or ()) if spec else []
    for portion in portions:
        directory = Path(portion) / "core"
        if directory.is_dir():
            return directory
    return None


def package_in(root: Path) -> Directory:
    """Return the directory of `megatron.core` in an unpacked tree or a wheel file.

    Raises FileNotFoundError when there is none.
    """
    base: Directory = zipfile.Path(root) if root.is_file() else root
    directory = base / "megatron" / "core"
    if not directory.is_dir():
        raise FileNotFoundError(f"{root}: found no megatron/core; expected an unpacked tree or a wheel file")
    return directory


def read_module(package: Directory, module: str) -> bytes | None:
    """Return the source of a module at or below `megatron.core`; None if it has none."""
    relative = module.split(".")[len(PACKAGE.split(".")) :]
    base = package
    for part in relative[:-1]:
        base = base / part
    candidates = [base / f"{relative[-1]}.py", base / relative[-1] / "__init__.py"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate.read_bytes()
    return None


def find_target(package: Directory | None, module: str, qualname: str) -> Found:
    """Read one target below `megatron.core`."""
    if package is None:
        return Found(problem="source-missing")
    text = read_module(package, module)
    if text is None:
        return Found(problem="module-missing")
    file = _read(text)
    if qualname in file.functions:
        return file.functions[qualname]
    if qualname in file.others:
        return Found(problem="not-a-function")
    owner, _, attribute = qualname.rpartition(".")
    if _is_inherited(file, owner, attribute):
        return Found(problem="inherited")
    return Found(problem="attribute-missing")


def _is_inherited(file: _File, owner: str, attribute: str) -> bool:
    """Whether a base of the class `owner`, in the same file, defines `attribute`."""
    seen = {owner}
    waiting = list(file.classes.get(owner, ()))
    while waiting:
        base = waiting.pop()
        if f"{base}.{attribute}" in file.functions:
            return True
        if base not in seen:
            seen.add(base)
            waiting += file.classes.get(base, ())
    return False


@lru_cache(maxsize=64)
def _read(text: bytes) -> _File:
    """Parse a file once per content: the content is the key, so an edited file is never served stale."""
    source = importlib.util.decode_source(text)
    try:
        tree = ast.parse(source)
    except SyntaxError:  # written for a newer Python: nothing can be said of it
        return _File({}, {}, frozenset())
    lines = source.split("\n")
    functions: dict[str, Found] = {}
    classes: dict[str, tuple[str, ...]] = {}
    others: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in _statements(body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions[prefix + node.name] = Found(_signature_in(node.args), _fingerprint(lines, node))
            elif isinstance(node, ast.ClassDef):
                classes[prefix + node.name] = tuple(base.id for base in node.bases if isinstance(base, ast.Name))
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                others.update(prefix + name.id for name in node.targets if isinstance(name, ast.Name))

    visit(tree.body, "")
    return _File(functions, classes, frozenset(others))


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body and of its conditional blocks: the last definition of a name counts."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node.body)
            yield from _statements(getattr(node, "orelse", ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)
            yield from _statements(getattr(node, "finalbody", ()))
