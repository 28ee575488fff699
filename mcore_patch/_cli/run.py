"""Run a script or module, as `python` would, with the patches applied first.

    torchrun --nproc-per-node 8 -m mcore_patch run pretrain_gpt.py ...
    python -m mcore_patch run -m package.module ...

What the script finds is what it finds without: `sys.argv`, `sys.path`, `__main__`; so are its exit code, what signals
do to it, and its tracebacks. Processes that it starts with `multiprocessing` are patched, however they are started;
other Python processes that it starts are not.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import io
import multiprocessing.spawn
import os
import pkgutil
import sys
import types
from collections.abc import Callable
from typing import Any

import mcore_patch

_USAGE = "mcore-patch run [-h] (-m MODULE | SCRIPT) [ARGS ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``mcore-patch run``: all of them are the script's."""
    parser.usage = _USAGE
    # Otherwise argparse would take options of the script's for ours, and drop a `--`.
    parser.prefix_chars = ""
    parser.add_argument("invocation", nargs=argparse.REMAINDER, metavar="-m MODULE | SCRIPT [ARGS ...]")


def run(options: argparse.Namespace) -> int:
    """Run the script to its end; 0 if it comes to one. Exit codes of its own are its SystemExit.

    2 if there is no such script, 1 if there is no such module, as for `python`.
    """
    command: list[str] = options.invocation
    if command[:1] in (["-h"], ["--help"]):
        print(f"usage: {_USAGE}\n\n{__doc__}")
        return 0
    is_module = command[:1] == ["-m"]
    if len(command) < 1 + is_module or (command[0].startswith("-") and not is_module):
        print(f"usage: {_USAGE}\nmcore-patch run: expected -m MODULE or a SCRIPT", file=sys.stderr)
        return 2
    mcore_patch.apply()
    _patch_children()
    return _run_module(command[1], command[2:]) if is_module else _run_script(command[0], command[1:])


def _run_script(path: str, arguments: list[str]) -> int:
    sys.argv = [path, *arguments]
    importer = pkgutil.get_importer(os.path.abspath(path))
    if importer is not None:  # a directory or an archive, with a __main__.py
        path = os.path.abspath(path)
        _put_on_path(path)
        spec = importer.find_spec("__main__", None)
        if spec is None:
            return _fail(f"can't find '__main__' module in {path!r}", 1)
        return _run_spec(spec)
    try:
        with io.open_code(os.path.abspath(path)) as file:
            start = file.read(4)
    except OSError as error:
        return _fail(f"can't open file {os.path.abspath(path)!r}: [Errno {error.errno}] {error.strerror}", 2)
    _put_on_path(os.path.dirname(os.path.realpath(path)))
    compiled = start == importlib.util.MAGIC_NUMBER
    kind = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
    loader = kind("__main__", os.path.abspath(path))
    main = _new_main(__file__=loader.path, __loader__=loader, __cached__=None)
    return _execute(main, lambda: _code_of(loader))


def _code_of(
    loader: importlib.machinery.SourceFileLoader | importlib.machinery.SourcelessFileLoader,
) -> types.CodeType | None:
    if isinstance(loader, importlib.machinery.SourcelessFileLoader):
        return loader.get_code("__main__")
    # Not get_code: it would write the script's bytecode to __pycache__.
    code: types.CodeType = loader.source_to_code(loader.get_data(loader.path), loader.path)
    return code


def _run_module(name: str, arguments: list[str]) -> int:
    sys.argv = ["-m", *arguments]  # what packages around the module see while it is looked for
    _put_on_path(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
            if spec is None:
                return _fail(
                    f"No module named {name}.__main__; {name!r} is a package and cannot be directly executed", 1
                )
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        return _fail(f"Error while finding module specification for {name!r} (ModuleNotFoundError: {error})", 1)
    if spec is None:
        return _fail(f"No module named {name}", 1)
    return _run_spec(spec)


def _run_spec(spec: importlib.machinery.ModuleSpec) -> int:
    loader: Any = spec.loader
    main = _new_main(__file__=spec.origin, __loader__=loader, __cached__=spec.cached)
    main.__spec__, main.__package__ = spec, spec.parent
    if sys.argv[0] == "-m":
        sys.argv[0] = str(spec.origin)
    return _execute(main, lambda: loader.get_code(spec.name))


def _new_main(**attributes: Any) -> types.ModuleType:
    """A fresh `__main__`, in `sys.modules` until the process ends: threads and exit handlers may still need it."""
    main = types.ModuleType("__main__")
    vars(main).update(attributes, __builtins__=sys.modules["builtins"])
    vars(main).setdefault("__annotations__", {})
    sys.modules["__main__"] = main
    return main


def _execute(main: types.ModuleType, load: Callable[[], types.CodeType | None]) -> int:
    try:
        code = load()
        if code is None:
            return _fail(f"no code in {main.__file__}", 1)
        exec(code, vars(main))
    except BaseException as error:
        _show_without_us(error)
        # To the interpreter, which knows what is to be done: it ends a process by SIGINT after a KeyboardInterrupt.
        raise
    return 0


def _show_without_us(error: BaseException) -> None:
    """Have the traceback of `error` shown, when the interpreter shows it, from the script's first frame on."""
    traceback = error.__traceback__
    while traceback is not None and _is_ours(traceback.tb_frame.f_code.co_filename):
        traceback = traceback.tb_next
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, shown: types.TracebackType | None) -> None:
        if value is error:
            shown = traceback
            value = value.with_traceback(traceback)
        hook(kind, value, shown)

    sys.excepthook = show


def _is_ours(filename: str) -> bool:
    return filename == __file__ or filename.startswith("<frozen importlib")


def _put_on_path(folder: str) -> None:
    """Replace what Python put in front of `sys.path` for us by what it would have put there for the script."""
    if not getattr(sys.flags, "safe_path", False):  # -P, -I or PYTHONSAFEPATH: it puts nothing there
        sys.path[0] = folder


def _fail(message: str, code: int) -> int:
    print(f"{sys.executable}: {message}", file=sys.stderr)
    return code


class _Applied:
    """Where this is unpickled, the patches are applied."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return mcore_patch.apply, ()


def _patch_children() -> None:
    """Patch processes that `multiprocessing` starts by spawning or from a fork server, too.

    Such a child imports the script anew, but not what ran it. The first thing that it unpickles is a dict of what it
    needs to know of its parent, most of all the script's path; entries that it does not know it passes over.
    """
    original = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {**original(name), "mcore_patch": _Applied()}

    multiprocessing.spawn.get_preparation_data = get_preparation_data
