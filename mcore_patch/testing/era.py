"""The torch, apex and transformer-engine that releases of megatron-core were written for.

Every fix names the release that needs it, and does nothing for the others.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any

import numpy
import packaging.version
import torch
import torch.distributed._shard.sharded_tensor as sharded_tensor
import torch.distributed.checkpoint.filesystem as filesystem
import torch.distributed.distributed_c10d as distributed_c10d

from mcore_patch._engine.source import find_package
from mcore_patch._engine.versions import read_versions, release_of
from mcore_patch.testing.adam import FusedAdam
from mcore_patch.testing.apex import stand_in_for_apex, transformer_engine_importable


def stand_in_for_era() -> None:
    """Makes megatron-core save, load and step with a torch of today, without apex and without transformer-engine.

    Call it after ``stand_in_for_cuda()`` and before ``megatron`` is imported elsewhere: it imports megatron-core.
    Calling it again does nothing.
    """
    _stand_in_for_numpy_product()
    _stand_in_for_pkg_resources()
    _stand_in_for_gloo()
    _stand_in_for_unconditional_imports()
    _stand_in_for_write_item()
    _stand_in_for_save_plan()
    _stand_in_for_moe_layers()
    _stand_in_for_quantization()
    _stand_in_for_version()
    _stand_in_for_fused_adam()


def _stand_in_for_numpy_product() -> None:
    """Up to 0.15 checkpoints are saved and loaded with ``numpy.product``, which numpy 2 has no more."""
    if not hasattr(numpy, "product"):
        numpy.product = numpy.prod  # type: ignore[attr-defined]


def _stand_in_for_pkg_resources() -> None:
    """0.6 to 0.8 import ``packaging`` from ``pkg_resources``, which setuptools vendors up to 69 and has up to 81."""
    if (_release() or (0, 9)) >= (0, 9):
        return
    try:
        module = importlib.import_module("pkg_resources")
    except ModuleNotFoundError:
        module = sys.modules["pkg_resources"] = ModuleType("pkg_resources")
    if not hasattr(module, "packaging"):
        module.packaging = packaging  # type: ignore[attr-defined]


def _stand_in_for_gloo() -> None:
    """gloo of torch 2.1 has no bfloat16, and gathers into a list of tensors only."""
    original = distributed_c10d.all_reduce
    if (release_of(torch.__version__) or ()) >= (2, 3) or hasattr(original, "stands_in"):
        return

    @functools.wraps(original)
    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype is not torch.bfloat16:
            return original(tensor, *args, **kwargs)
        wide = tensor.float()
        done = original(wide, *args, **kwargs)
        if done is not None:
            done.wait()
        with torch.no_grad():
            tensor.copy_(wide)
        return done

    def all_gather_into_tensor(output: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        parts = list(output.view(torch.uint8).chunk(distributed_c10d.get_world_size(group)))
        return distributed_c10d.all_gather(parts, tensor.view(torch.uint8), group, async_op)

    all_reduce.stands_in = True  # type: ignore[attr-defined]
    modules: tuple[Any, ...] = (torch.distributed, distributed_c10d)
    for module in modules:
        module.all_reduce = all_reduce
        module.all_gather_into_tensor = all_gather_into_tensor
        module._all_gather_base = all_gather_into_tensor


def _stand_in_for_unconditional_imports() -> None:
    """0.6 and 0.7 import apex and transformer-engine without asking, and a module that torch 2.5 has moved."""
    release = _release()
    if release is None or release >= (0, 8) or "megatron.core" in sys.modules:
        return
    sys.modules.setdefault("torch.distributed._sharded_tensor", sharded_tensor)
    stand_in_for_apex()
    with transformer_engine_importable():
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer  # noqa: F401


def _release() -> tuple[int, ...] | None:
    return release_of(read_versions(find_package()).stated)


def _stand_in_for_save_plan() -> None:
    """0.6 to 0.8 plan the writing of objects on ranks other than the first; torch does it itself since 2.4."""
    import megatron.core.dist_checkpointing.strategies.torch as strategies

    original: Any = strategies.MCoreSavePlanner.create_local_plan
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def create_local_plan(self: Any) -> Any:
        plan = original(self)
        items = list({item.index: item for item in plan.items}.values())
        return plan if len(items) == len(plan.items) else dataclasses.replace(plan, items=items)

    strategies.MCoreSavePlanner.create_local_plan = create_local_plan


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
        utils._te_version = packaging.version.Version("0.0.0")


def _stand_in_for_fused_adam() -> None:
    """All releases: see :class:`FusedAdam`."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer

    for module in (optimizer, distrib_optimizer):
        module.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
