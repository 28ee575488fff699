"""Host memory on a machine that has no other: what ``HybridDeviceOptimizer`` needs to offload anything.

megatron-core's CPU offloading (0.12 and later) asks each tensor ``is_cuda`` and moves some of those that are to the
host. On a machine without a GPU none is: it would offload nothing and hold no copies.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _HostMemory(TorchFunctionMode):
    """Tensors are on the GPU, except what ``Tensor.cpu()`` returned and what was made from that."""

    def __init__(self) -> None:
        super().__init__()
        # By identity, kept alive so that no identity is used twice.
        self._on_host: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from_host = bool(args) and id(args[0]) in self._on_host
        # Every access makes another wrapper of the getter, so `is` is never true.
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return not from_host
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu and not from_host:
            # From a GPU this is a copy; here torch has returned the tensor itself.
            result = result.clone()
            from_host = True
        if from_host and isinstance(result, torch.Tensor):
            self._on_host[id(result)] = result
        return result


def stand_in_for_offload() -> None:
    """Makes ``HybridDeviceOptimizer`` split its parameters as it does where there is a GPU.

    Imports megatron-core; does nothing for a release without the optimizer, nor when it is called again.
    """
    name = "megatron.core.optimizer.cpu_offloading"
    if importlib.util.find_spec(name) is None:
        return
    optimizer: Any = importlib.import_module(f"{name}.hybrid_optimizer").HybridDeviceOptimizer
    original = optimizer._get_sub_optimizer_param_groups
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def split(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _HostMemory():
            return original(self, *args, **kwargs)

    optimizer._get_sub_optimizer_param_groups = split
