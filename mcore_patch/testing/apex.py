"""What megatron-core 0.6 and 0.7 import without asking: the few names of apex and transformer-engine that they need.

apex is on no package index, and transformer-engine is built for GPUs. Neither computes anything here that a test looks
at: the optimizer is :class:`~mcore_patch.testing.adam.FusedAdam`, and the layers are megatron-core's local ones.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from mcore_patch.testing.adam import FusedAdam

# The transformer-engine of 0.6's and 0.7's time.
_TRANSFORMER_ENGINE = "1.7.0"


def stand_in_for_apex() -> None:
    """Makes ``apex`` and ``amp_C`` importable, with what the optimizers of 0.6 and 0.7 take from them.

    Does nothing where apex is installed, or has been stood in for already.
    """
    if "apex" in sys.modules or importlib.util.find_spec("apex") is not None:
        return
    _module("apex")
    _module("apex.optimizers", FusedAdam=FusedAdam, FusedSGD=torch.optim.SGD)
    _module("apex.normalization.fused_layer_norm", FusedLayerNormAffineFunction=_LayerNorm)
    _module("apex.normalization")
    _module("apex.multi_tensor_apply", multi_tensor_applier=_multi_tensor_applier)
    _module("amp_C", multi_tensor_scale=_multi_tensor_scale, multi_tensor_l2norm=_multi_tensor_l2norm)


@contextmanager
def transformer_engine_importable() -> Iterator[None]:
    """While megatron-core is being imported: a ``transformer_engine`` with a layer norm, and classes to derive from.

    It is gone afterwards, so that nobody who asks for transformer-engine later believes that it is there.
    """
    if "transformer_engine" in sys.modules or importlib.util.find_spec("transformer_engine") is not None:
        yield
        return
    layers = ("Linear", "LayerNormLinear", "DotProductAttention", "RMSNorm")
    bases = {name: type(name, (torch.nn.Module,), {}) for name in layers}
    pytorch = _module("transformer_engine.pytorch", LayerNorm=_FinalNorm, **bases)
    recipe = _module("transformer_engine.common.recipe", DelayedScaling=type("DelayedScaling", (), {}))
    common = _module("transformer_engine.common", recipe=recipe)
    _module("transformer_engine.pytorch.distributed", checkpoint=_absent)
    _module("transformer_engine", pytorch=pytorch, common=common, __version__=_TRANSFORMER_ENGINE)
    version = importlib.metadata.version

    def version_of(distribution_name: str) -> str:
        return _TRANSFORMER_ENGINE if distribution_name == "transformer-engine" else version(distribution_name)

    importlib.metadata.version = version_of
    try:
        yield
    finally:
        importlib.metadata.version = version
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]


class _LayerNorm:
    """What 0.6 and 0.7 have instead of a layer norm of their own."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor, weight: Any, bias: Any, shape: Any, eps: float) -> torch.Tensor:
        """The signature is looked at; the call goes through ``apply``."""
        raise NotImplementedError

    @staticmethod
    def apply(tensor: torch.Tensor, weight: Any, bias: Any, shape: Any, eps: float) -> torch.Tensor:
        return torch.nn.functional.layer_norm(tensor, tuple(shape), weight, bias, eps)


class _FinalNorm(torch.nn.LayerNorm):
    """transformer-engine's layer norm, which 0.6 and 0.7 take after the last layer whatever the layers' spec."""

    def __init__(self, hidden_size: int, eps: float, sequence_parallel: bool = False, **_: Any) -> None:
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


def _module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    module.__path__ = []  # importable names below it have entries of their own in sys.modules
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


def _absent(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("transformer-engine is not installed; this is a stand-in that can be imported only")


def _multi_tensor_applier(op: Callable[..., Any], overflow: Any, lists: list[list[torch.Tensor]], *args: Any) -> Any:
    return op(2048 * 32, overflow, lists, *args)


def _multi_tensor_scale(_chunk: int, _overflow: Any, lists: list[list[torch.Tensor]], scale: float) -> None:
    for source, target in zip(*lists, strict=True):
        target.copy_(source * scale)


def _multi_tensor_l2norm(
    _chunk: int, _overflow: Any, lists: list[list[torch.Tensor]], _per_tensor: bool
) -> tuple[torch.Tensor, None]:
    return torch.stack([tensor.float().norm() for tensor in lists[0]]).norm().reshape(1), None
