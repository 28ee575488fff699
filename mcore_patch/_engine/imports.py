"""Calls back when a module has been imported, whether that is past, going on, or still to come."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import wrapt

from .logs import LOGGER

Callback = Callable[[types.ModuleType], None]


def hold_while_forking(lock: Any) -> None:
    """Let no fork happen while another thread is in `lock`: the child would wait for a thread that it has not."""
    register = getattr(os, "register_at_fork", lambda **_: None)  # Windows has none
    register(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


_lock = threading.Lock()
hold_while_forking(_lock)
_unfinished: dict[int, tuple[types.ModuleType, list[Callback]]] = {}
"""Half-imported modules by the id of their spec, with the callbacks that wait for them."""


def finished_module(name: str) -> types.ModuleType | None:
    """Return a module that is imported to its end; None if it is not, or not yet."""
    module = sys.modules.get(name)
    return None if module is None or _is_half_imported(module) else module


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` once `name` is imported to its end: now, or before its `import` returns.

    The callback may run in any thread, under that module's import lock, and must not wait for a lock under
    which somebody imports. It may run twice. Whatever it raises is logged: from an import hook it would make
    the user's own `import` fail. There is no taking back: callbacks ask for themselves whether they still
    apply.
    """
    registering = True

    def hook(module: types.ModuleType) -> None:
        # wrapt calls at once for what is in sys.modules, be it half-imported. Later it calls at the end of
        # the module's code, where importlib still says "initializing".
        if registering and _is_half_imported(module):
            _when_finished(module, callback)
        else:
            _call(callback, module)

    try:
        wrapt.register_post_import_hook(hook, name)  # positional: the keywords changed in wrapt 2
    except KeyError:
        # wrapt 1.14 cannot wait for a module that was imported before, and is no longer (its import failed).
        LOGGER.debug("cannot wait for the next import of %s: call apply() after it", name)
    registering = False


def _is_half_imported(module: types.ModuleType) -> bool:
    return bool(getattr(vars(module).get("__spec__"), "_initializing", False))


def _call(callback: Callback, module: types.ModuleType) -> None:
    try:
        callback(module)
    except Exception:
        LOGGER.exception("mcore-patch failed in the import hook of %s", module.__name__)


class _WatchedSpec(importlib.machinery.ModuleSpec):
    """The spec of a half-imported module, until importlib marks the import as ended.

    importlib clears `_initializing` as its last act, before the `import` statement returns. That makes it the
    one moment at which a module whose code is already running can be patched in time: its loader can no
    longer be wrapped, and its import lock is held by the very thread that may have called `apply()`.
    """

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            _finish(self)


def _when_finished(module: types.ModuleType, callback: Callback) -> None:
    spec = module.__spec__
    if type(spec) not in (importlib.machinery.ModuleSpec, _WatchedSpec):
        return _call(callback, module)  # a spec of somebody's own making: patch what is there already
    assert spec is not None
    with _lock:
        _unfinished.setdefault(id(spec), (module, []))[1].append(callback)
        spec.__class__ = _WatchedSpec
    if not _is_half_imported(module):  # it ended in another thread, perhaps before the class was set
        _finish(spec)
    return None


def _finish(spec: importlib.machinery.ModuleSpec) -> None:
    with _lock:
        spec.__class__ = importlib.machinery.ModuleSpec
        module, callbacks = _unfinished.pop(id(spec), (sys, []))
    for callback in callbacks:
        if sys.modules.get(spec.name) is module:
            _call(callback, module)
        else:  # the import failed: wait for the next one
            when_imported(spec.name, callback)
