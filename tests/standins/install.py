"""Lets the real Transformer Engine, releases 1.13 to 2.20, be imported where there is no GPU and no libcuda.

:func:`stand_in_for_transformer_engine` comes before the first import of ``transformer_engine`` and of ``megatron``. It

* makes ``torch.cuda`` mean the CPU (``mcore_patch.testing``), and say that there is a GPU, one of the Hopper kind;
* keeps ``transformer_engine.common`` from loading shared objects, and gives ``transformer_engine.pytorch`` the stand-in
  beside this file for its extension;
* makes the release say that it supports every fp8 recipe. (It then takes MXFP8 for its default: name the recipe.)

Since every tensor then says that it lies on a GPU, a mix-up of devices cannot be seen in such a process.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mcore_patch.testing import cuda as cuda_stand_in
from mcore_patch.testing import era, stand_in_for_cuda

_EXTENSION = Path(__file__).with_name("transformer_engine_torch.py")

_ENVIRONMENT = {
    # Compilers have nothing to gain here, and trip over the stand-ins.
    "TORCHDYNAMO_DISABLE": "1",
    # Of the ways to a softmax, the one in plain torch.
    "NVTE_MASKED_SOFTMAX_FUSION": "0",
}


def stand_in_for_transformer_engine() -> None:
    """Installs the stand-ins in this process; there is no way back. A second call does nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    stand_in_for_cuda()
    era._stand_in_for_write_item()
    _stand_in_for_hopper()
    _keep_stand_in_during_backward()
    _stand_in_for_coalescing()
    sys.meta_path.insert(0, _Finder())


# --------------------------------------------------------------------------------------------------------------- torch


def _stand_in_for_hopper() -> None:
    """On a Hopper, fp8 weights keep transposed copies of their bytes: the harder case."""
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        name="cpu", major=9, minor=0, total_memory=1 << 34, multi_processor_count=1
    )
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, lambda *_, **__: None)
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda _: True)
    # Asked for below __torch_dispatch__, too, where no torch function mode is active.
    tensor.cuda = lambda self, *_, **__: self
    # Refuses a stream that is none before any torch function mode is asked.
    tensor.record_stream = lambda *_: None


def _keep_stand_in_during_backward() -> None:
    """``Tensor.backward`` runs with the torch function mode of the stand-in for CUDA off; the backward passes of
    Transformer Engine allocate on ``"cuda"``.
    """
    autograd: Any = torch.autograd
    run_backward = autograd._engine_run_backward

    def with_stand_in(*args: Any, **kwargs: Any) -> Any:
        with cuda_stand_in._CpuForCuda():
            return run_backward(*args, **kwargs)

    autograd._engine_run_backward = with_stand_in


def _stand_in_for_coalescing() -> None:
    """Collectives that were to be coalesced run one by one.

    gloo mixes up a coalesced gather of tensors of several dtypes (bytes of fp8 weights and bf16 weights), silently.
    """
    c10d: Any = distributed_c10d

    @contextlib.contextmanager
    def one_by_one(
        group: Any = None, device: Any = None, async_ops: bool = False
    ) -> Iterator[distributed_c10d._CoalescingManager]:
        group = group or c10d._get_default_group()
        recorded = c10d._world.pg_coalesce_state.setdefault(group, [])
        yield c10d._CoalescingManager()
        del c10d._world.pg_coalesce_state[group]
        for call in recorded:
            if call.op is dist.all_reduce:
                call.op(call.tensor, call.redop, group)
            elif call.redop is None:
                call.op(call.dst_tensor, call.tensor, group)
            else:
                call.op(call.dst_tensor, call.tensor, call.redop, group)

    c10d._coalescing_manager = one_by_one
    dist._coalescing_manager = one_by_one  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------- Transformer Engine


class _NoSharedObjects:
    """While ``transformer_engine.common`` executes, it takes itself to be part of a build and loads nothing."""

    def __enter__(self) -> None:
        os.environ["NVTE_PROJECT_BUILDING"] = "1"

    def __exit__(self, *_: object) -> None:
        del os.environ["NVTE_PROJECT_BUILDING"]


def _load_extension(*_: Any) -> None:
    name = _EXTENSION.stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, _EXTENSION)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])


class _FolderOfExtension:
    """The folder in which releases up to 2.3 look for the shared object; every folder in it is itself."""

    def __truediv__(self, _: str) -> _FolderOfExtension:
        return self

    def glob(self, pattern: str) -> Iterator[Path]:
        # The extension for JAX is looked for, too.
        return iter([_EXTENSION] if pattern.startswith(_EXTENSION.stem) else [])


def _after_common(module: Any) -> None:
    if hasattr(module, "load_framework_extension"):
        module.load_framework_extension = _load_extension
    else:
        _alias_onnx_modules()
        # Up to 2.3, transformer_engine.pytorch looks for the file itself.
        module.get_te_path = _FolderOfExtension
        module.is_package_installed = lambda _: False


def _after_recipes(module: Any) -> None:
    for name in vars(module).copy():
        if name.startswith("check_") and name.endswith("_support") and name != "check_recipe_support":
            setattr(module, name, lambda: (True, ""))


def _alias_onnx_modules() -> None:
    """1.x imports two modules from where torch had them before 2.9."""
    for parent, name in (("torch.onnx", "_type_utils"), ("torch.onnx._internal", "jit_utils")):
        if importlib.util.find_spec(f"{parent}.{name}") is None:
            moved = importlib.import_module(f"torch.onnx._internal.torchscript_exporter.{name}")
            setattr(importlib.import_module(parent), name, moved)


def _after_utils(module: Any) -> None:
    if hasattr(module, "canonicalize_device"):
        module.canonicalize_device = lambda _: torch.device("cpu")


_Hook = Callable[[Any], None]
_HOOKS: dict[str, _Hook] = {
    "transformer_engine.common": _after_common,
    "transformer_engine.pytorch.fp8": _after_recipes,
    "transformer_engine.pytorch.quantization": _after_recipes,
    "transformer_engine.pytorch.utils": _after_utils,
}


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, hook: _Hook) -> None:
        self._loader = loader
        self._hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _NoSharedObjects() if self._hook is _after_common else contextlib.nullcontext():
            self._loader.exec_module(module)
        self._hook(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _HOOKS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _HOOKS[fullname])
        return spec
