"""Station 2, its usual entrance: ``Module.load_state_dict`` of a model that has megatron-core modules in it.

The copy is watched at the leaves, below all wrappers and after the modules' own rewriting of keys (grouped experts,
fused projections, renamed norms), because only there a tensor and its Parameter meet.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mcore_patch._stations.guard import standing_aside
from mcore_patch._stations.parameters import is_plain
from mcore_patch._stations.remember import memory, same_memory

ORIGIN = "load_state_dict"


class _State(threading.local):
    """What this thread is loading: nothing, or a megatron-core model whose fp32 parameters may yet be cast."""

    loading: bool = False
    will_be: torch.dtype | None = None


_state = _State()


@contextmanager
def loading(root: torch.nn.Module) -> Iterator[None]:
    """Watch the leaves of ``root`` while it loads, if it is or holds a megatron-core module."""
    outer = (_state.loading, _state.will_be)
    if not _state.loading:
        with standing_aside("looking at the model that is being loaded"):
            module = _megatron_module(root)
            if module is not None:
                _state.loading, _state.will_be = True, _narrow_dtype(module)
    try:
        yield
    finally:
        _state.loading, _state.will_be = outer


def about_to_load_leaf(module: torch.nn.Module) -> None:
    """A module's own parameters are going to be loaded, which under torch's flag swaps them (see ``let_go``)."""
    if _state.loading:
        with standing_aside("letting go of parameters that may be swapped", otherwise=memory.clear):
            if _swaps():
                for parameter in module._parameters.values():
                    if parameter is not None:
                        memory.forget(parameter)


def _swaps() -> bool:
    """torch's flag, which is there since 2.3."""
    flag = getattr(torch.__future__, "get_swap_module_params_on_conversion", None)
    return flag is not None and bool(flag())


def leaf_loaded(module: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """A module's own parameters have been loaded from ``state_dict[prefix + name]``."""
    if not _state.loading:
        return
    with standing_aside("remembering what load_state_dict brought"):
        for name, parameter in module._parameters.items():
            key = prefix + name
            tensor = state_dict.get(key)
            # An in-place distributed load returns the parameters themselves; that load has been seen already.
            if isinstance(parameter, torch.nn.Parameter) and not _is_itself(tensor, parameter):
                memory.loaded(parameter, tensor, ORIGIN, name=key, will_be=_state.will_be)


def _megatron_module(root: torch.nn.Module) -> torch.nn.Module | None:
    defined = sys.modules.get("megatron.core.transformer.module")
    if defined is None:
        return None
    return next((module for module in root.modules() if isinstance(module, defined.MegatronModule)), None)


def _narrow_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """The dtype that Float16Module casts this model to; None for an fp32 model."""
    config = getattr(module, "config", None)
    if getattr(config, "bf16", False):
        return torch.bfloat16
    return torch.float16 if getattr(config, "fp16", False) else None


def _is_itself(tensor: Any, parameter: torch.Tensor) -> bool:
    return (
        isinstance(tensor, torch.Tensor) and is_plain(tensor) and is_plain(parameter) and same_memory(tensor, parameter)
    )
