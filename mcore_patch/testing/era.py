"""The torch, apex and transformer-engine that releases of megatron-core were written for.

Every fix names the release that needs it, and does nothing for the others.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from typing import Any

import torch.distributed.checkpoint.filesystem as filesystem
from packaging.version import Version

from mcore_patch.testing.adam import FusedAdam


def stand_in_for_era() -> None:
    """Makes megatron-core 0.10 and later save, load and step with a torch of today and without transformer-engine.

    Call it after ``stand_in_for_cuda()`` and before ``megatron`` is imported elsewhere: it imports megatron-core.
    Calling it again does nothing.
    """
    _stand_in_for_write_item()
    _stand_in_for_moe_layers()
    _stand_in_for_quantization()
    _stand_in_for_version()
    _stand_in_for_fused_adam()


def _stand_in_for_write_item() -> None:
    """0.10 and 0.11 call ``_write_item(stream, data, item, key)``, 0.12 puts a transform first.

    torch has the transform since 2.6 and asks for a serialization format as well since 2.8. 0.13 and later look at the
    signature and pass what it names.
    """
    current: Any = filesystem._write_item
    if hasattr(current, "__wrapped__") or "serialization_format" not in inspect.signature(current).parameters:
        return

    @functools.wraps(current)
    def write_item(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0], filesystem._StorageWriterTransforms):
            args = (filesystem._StorageWriterTransforms(), *args)
        if len(args) == 5:
            kwargs.setdefault("serialization_format", filesystem.SerializationFormat.TORCH_SAVE)
        return current(*args, **kwargs)

    filesystem._write_item = write_item


def _stand_in_for_moe_layers() -> None:
    """0.10: the local MoE layer spec names transformer-engine layers, unused there, that were not imported."""
    import megatron.core.models.gpt.gpt_layer_specs as specs

    for name in ("TEColumnParallelGroupedLinear", "TEColumnParallelLinear", "TERowParallelLinear"):
        if not hasattr(specs, name):
            setattr(specs, name, None)


def _stand_in_for_quantization() -> None:
    """0.12: ``step()`` raises "Invalid Transformer Engine version" although it has no fp8 parameter to quantize."""
    if importlib.util.find_spec("megatron.core.fp8_utils") is None:
        return
    import megatron.core.fp8_utils as fp8_utils

    original: Any = getattr(fp8_utils, "_quantize_param_shard_impl", None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def quantize(model_params: list[Any], *args: Any, **kwargs: Any) -> None:
        if model_params:
            original(model_params, *args, **kwargs)

    fp8_utils._quantize_param_shard_impl = quantize


def _stand_in_for_version() -> None:
    """Up to 0.16 ``is_te_min_version()`` compares None without transformer-engine; later it is version 0.0.0."""
    import megatron.core.utils as utils

    if getattr(utils, "_te_version", None) is None:
        utils._te_version = Version("0.0.0")


def _stand_in_for_fused_adam() -> None:
    """All releases: see :class:`FusedAdam`."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    for module in (optimizer, distrib_optimizer):
        module.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
