"""Exceptions in our own steps: every function of the stations, found by reading their sources.

A step fails where it begins, or, where it has a part that is guarded, where that begins: a statement that raises is put
there, and the function's code is swapped, so that everybody who holds the function runs into it, closures and tables
included.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard

PACKAGE = "mcore_patch._stations"


class Fault(Exception):
    """What a step raises."""


@dataclass
class Plan:
    """When the step fails: at its calls from ``first`` on, ``times`` times. ``hits`` counts its calls."""

    first: int = 1
    times: int = 10**9
    hits: int = field(default=0, compare=False)
    error: type[BaseException] = Fault


_plan: Plan | None = None


def hit() -> None:
    """What is put in front of the step."""
    assert _plan is not None
    _plan.hits += 1
    if _plan.first <= _plan.hits < _plan.first + _plan.times:
        raise _plan.error("a fault of the test's making")


def steps() -> list[str]:
    """The names of all steps, such as ``masters.write`` and ``optimizers._in_tensors.write``: nested ones as well."""
    return [f"{module}.{name}" for module in _modules() for name in _functions(module)]


@contextmanager
def fault(step: str, plan: Plan) -> Iterator[Plan]:
    """``step`` fails by ``plan`` inside."""
    global _plan
    module, _, name = step.partition(".")
    outermost, code = _holder(module, name), _with_fault(module, name)
    before = outermost.__code__
    _plan, outermost.__code__ = plan, code
    try:
        yield plan
    finally:
        _plan, outermost.__code__ = None, before


def taken(action: Callable[[], object]) -> set[str]:
    """The steps that ``action`` takes."""
    places = set()

    def profile(frame: Any, event: str, _: object) -> None:
        if event == "call":
            places.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(before)
    return {step for step in steps() if _first_line(step) in places}


def _first_line(step: str) -> tuple[str | None, int]:
    module, _, name = step.partition(".")
    node = next(node for place, node in _walk(_tree(module)) if ".".join(place) == name)
    lines = [node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]
    return _module(module).__file__, min(lines)


@cache
def _modules() -> list[str]:
    package = importlib.import_module(PACKAGE)
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{PACKAGE}.{name}")


def _parse(module: str) -> ast.Module:
    path = _module(module).__file__
    assert path is not None
    return ast.parse(Path(path).read_text(encoding="utf-8"))


_tree = cache(_parse)


Function = ast.FunctionDef | ast.Lambda
_Place = tuple[str, ...]


def _functions(module: str) -> list[str]:
    """All functions of a module by dotted name. The lambdas of a function are numbered."""
    return [".".join(place) for place, _ in _walk(_tree(module))]


def _walk(node: ast.AST, place: _Place = ()) -> Iterator[tuple[_Place, Function]]:
    lambdas = 0
    waiting = list(ast.iter_child_nodes(node))
    while waiting:
        child = waiting.pop(0)
        if isinstance(child, ast.ClassDef):
            yield from _walk(child, (*place, child.name))
        elif isinstance(child, ast.FunctionDef):
            yield (*place, child.name), child
            yield from _walk(child, (*place, child.name))
        elif isinstance(child, ast.Lambda) and place:
            yield (*place, f"lambda{lambdas}"), child
            lambdas += 1
        else:
            waiting[:0] = ast.iter_child_nodes(child)


def _with_fault(module: str, name: str) -> CodeType:
    """The code of the outermost function around a step, where the step calls :func:`hit` first."""
    tree = _parse(module)
    node = next(node for place, node in _walk(tree) if ".".join(place) == name)
    call = ast.parse(f"__import__({__name__!r}, fromlist=['hit']).hit()", mode="eval").body
    if isinstance(node, ast.Lambda):
        node.body = ast.Subscript(ast.Tuple([call, node.body], ast.Load()), ast.Constant(1), ast.Load())
    else:
        for body in [each.body for each in ast.walk(node) if _guards(each)] or [node.body]:
            body.insert(0, ast.Expr(call))
    compiled = compile(ast.fix_missing_locations(tree), _module(module).__file__ or "", "exec", dont_inherit=True)
    wanted = _holder(module, name).__code__
    for code in _codes(compiled):
        if (code.co_name, code.co_firstlineno) == (wanted.co_name, wanted.co_firstlineno):
            return code
    raise AssertionError(f"{module}.{name}: its code is not in the source")


def _guards(node: ast.AST) -> TypeGuard[ast.With]:
    return isinstance(node, ast.With) and any("standing_aside" in ast.unparse(item) for item in node.items)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _holder(module: str, name: str) -> FunctionType:
    """The function of the module, or method of a class in it, that a step is or lies in."""
    found: Any = _module(module)
    for part in name.split("."):
        found = vars(found)[part]
        found = found.fget if isinstance(found, property) else found
        found = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        if not isinstance(found, type):
            break
    function = inspect.unwrap(found)
    assert isinstance(function, FunctionType)
    return function


def on_ranks(
    scenario: Any, folder: Path, patched: bool, step: str = "", failing: tuple[int, ...] = ()
) -> tuple[list[str], dict[str, str], list[str]]:
    """A scenario on real megatron-core, in which ``step`` fails on some ranks.

    This rank's digests of masters and of the model, and the WARNINGs.
    """
    import torch

    from . import masters as measure
    from . import pipeline as p
    from .models import initialize_parallel

    initialize_parallel(scenario)
    truth = p.read_truth(scenario, folder)
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_patch").addHandler(handler)
    if patched:
        import mcore_patch

        mcore_patch.apply()
    fails = torch.distributed.get_rank() in failing
    with fault(step, Plan()) if fails else nullcontext():
        pipeline = p.build_and_load(scenario, "patched" if patched else "stock", folder, truth)
    masters = [
        hashlib.sha256(master.detach().float().contiguous().numpy().tobytes()).hexdigest()
        for _, master, _ in measure.masters_of(pipeline.optimizer)
    ]
    return masters, measure.model_snapshot(pipeline.chunks), heard
