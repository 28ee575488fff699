"""A megatron-core of one file: real torch modules and tensors, and no more of the rest than the patches look at.

Classes and functions have the names, the places and the signatures of megatron-core's, so that
``mcore_patch.apply()`` finds its targets in them. One process stands for one data-parallel rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

Tensors = dict[str, torch.Tensor]

CHECKPOINTS: dict[str, Tensors] = {}
"""What "lies on disk", by directory."""

TOO_WIDE: dict[str, Exception] = {}
"""What reading a key into an fp32 target raises: there is no memory for it."""


# ------------------------------------------------------------------------------------------------------------- models


class MegatronModule(torch.nn.Module):
    """A module with a config, as megatron-core's models are."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config

    def sharded_state_dict(self) -> dict[str, Any]:
        # Upstream's come from state_dict(keep_vars=True): the Parameters themselves.
        return {name: ShardedTensor(name, tensor) for name, tensor in self.state_dict(keep_vars=True).items()}


class Float16Module(torch.nn.Module):
    """Casts what it wraps, and adds a prefix to its names."""

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.module = module.to(dtype)

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


# ------------------------------------------------------------------------------------------------ quantized parameters


class QuantizedTensor(torch.Tensor):
    """The base class of quantized tensors."""


class Float8Tensor(QuantizedTensor):
    """Nominally bf16; holds fp8 values times a scale that is a power of two, which bf16 holds as well."""

    SCALE_INV = 2.0**-8

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> Float8Tensor:
        made = torch.Tensor._make_subclass(cls, cls.quantize(values).bfloat16())
        made._scale_inv = torch.tensor([cls.SCALE_INV])  # type: ignore[attr-defined]
        return made

    @classmethod
    def quantize(cls, values: torch.Tensor) -> torch.Tensor:
        grid = (values.float() / cls.SCALE_INV).clamp(-448, 448)
        return grid.to(torch.float8_e4m3fn).float() * cls.SCALE_INV

    def copy_(self, values: torch.Tensor, *_: Any) -> Any:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).copy_(self.quantize(values.as_subclass(torch.Tensor)))

    def float(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).float()


# --------------------------------------------------------------------------------------------- distributed checkpoints


class ShardedTensor:
    """The whole of one tensor, on this rank."""

    flattened_range = None
    prepend_axis_num = 0

    def __init__(self, key: str, data: torch.Tensor) -> None:
        self.key, self.data, self.dtype = key, data, data.dtype
        self.local_shape = self.global_shape = tuple(data.shape)
        self.global_offset = (0,) * data.dim()


def _map(tree: Any, function: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _map(value, function) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_map(value, function) for value in tree]
    return function(tree)


def _fill(sharded: Any, checkpoint_dir: str) -> Any:
    """The target of a ShardedTensor, or a new one of its dtype, with the value from disk cast to that."""
    if not isinstance(sharded, ShardedTensor):
        return sharded
    if sharded.key in TOO_WIDE and sharded.dtype is torch.float32:
        raise TOO_WIDE[sharded.key]
    target = torch.empty(sharded.local_shape, dtype=sharded.dtype) if sharded.data is None else sharded.data.detach()
    target.copy_(CHECKPOINTS[checkpoint_dir][sharded.key])
    sharded.data = target if sharded.data is None else sharded.data
    return target


class TorchDistLoadShardedStrategy:
    def load_tensors_metadata(self, checkpoint_dir: str) -> dict[str, Any]:
        return {key: SimpleNamespace(dtype=each.dtype) for key, each in CHECKPOINTS[checkpoint_dir].items()}

    def load(self, sharded_state_dict: Any, checkpoint_dir: str) -> Any:
        return _map(sharded_state_dict, lambda leaf: _fill(leaf, checkpoint_dir))


class TensorStoreLoadShardedStrategy:
    """zarr: replaces the leaves of the dict that it is given."""

    def __init__(self, load_directly_on_device: bool = True) -> None:
        self.load_directly_on_device = load_directly_on_device

    load_tensors_metadata = TorchDistLoadShardedStrategy.load_tensors_metadata

    def load(self, sharded_state_dict: Any, checkpoint_dir: str) -> Any:
        for key, leaf in list(sharded_state_dict.items()):
            if isinstance(leaf, dict):
                self.load(leaf, checkpoint_dir)
            elif self.load_directly_on_device or not isinstance(leaf, ShardedTensor):
                assert not isinstance(leaf, ShardedTensor) or leaf.data is not None, "it copies into what is there"
                sharded_state_dict[key] = _fill(leaf, checkpoint_dir)
            else:
                sharded_state_dict[key] = CHECKPOINTS[checkpoint_dir][leaf.key].clone()
        return sharded_state_dict


class FullyParallelLoadStrategyWrapper:
    def __init__(self, base_strategy: Any) -> None:
        self.base_strategy = base_strategy

    def load(self, sharded_state_dict: Any, checkpoint_dir: str) -> Any:
        return self.base_strategy.load(sharded_state_dict, checkpoint_dir)


def load(
    sharded_state_dict: Any,
    checkpoint_dir: str,
    sharded_strategy: Any = None,
    common_strategy: Any = None,
    validate_access_integrity: bool = True,
    strict: Any = None,
) -> Any:
    strategy = sharded_strategy or TorchDistLoadShardedStrategy()
    loaded = strategy.load(sharded_state_dict, checkpoint_dir)
    return (loaded, set(), set()) if strict == "return_all" else loaded


def load_by_name(*args: Any, **how: Any) -> Any:
    """:func:`load` as a pipeline finds it: patched, where the patch is in place."""
    return sys.modules["megatron.core.dist_checkpointing.serialization"].load(*args, **how)


@contextmanager
def swapping() -> Iterator[None]:
    """Under torch's flag by which loads and casts swap parameters, which is there since 2.3."""
    flag = getattr(torch.__future__, "set_swap_module_params_on_conversion", lambda _: None)
    flag(True)
    try:
        yield
    finally:
        flag(False)


# ---------------------------------------------------------------------------------------------------------- optimizers


def is_16_bit(parameter: torch.Tensor) -> bool:
    return parameter.dtype in (torch.float16, torch.bfloat16)


class MixedPrecisionOptimizer:
    def __init__(self, optimizer: Any, config: Any) -> None:
        self.optimizer, self.config = optimizer, config

    def reload_model_params(self, state_dict: Any = None) -> None:
        if state_dict is not None:
            self._copy_model_params_to_main_params(state_dict)
        else:
            self._copy_model_params_to_main_params()

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        raise NotImplementedError

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


class Float16OptimizerWithFloat16Params(MixedPrecisionOptimizer):
    def __init__(self, optimizer: Any, config: Any, grad_scaler: Any, init_state_fn: Any) -> None:
        super().__init__(optimizer, config)
        narrow = [[each for each in group["params"] if is_16_bit(each)] for group in optimizer.param_groups]
        self.float16_groups = narrow
        self.fp32_from_float16_groups = [[each.detach().clone().float() for each in group] for group in narrow]

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        assert state_dict is None, "Initialize main params from state dict is not supported"
        for group, mains in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(group, mains, strict=True):
                main.copy_(parameter.detach().float())

    def state_dict(self) -> Any:
        return {"masters": [main.clone() for group in self.fp32_from_float16_groups for main in group]}

    def load_state_dict(self, state_dict: Any) -> None:
        mains = [main for group in self.fp32_from_float16_groups for main in group]
        for main, saved in zip(mains, state_dict["masters"], strict=True):
            main.copy_(saved.view(main.shape))


class FP32Optimizer:
    def __init__(self, optimizer: Any, config: Any = None, init_state_fn: Any = None) -> None:
        self.optimizer = optimizer

    def reload_model_params(self, state_dict: Any = None) -> None: ...


class ChainedOptimizer:
    def __init__(self, chained_optimizers: Any) -> None:
        self.chained_optimizers = chained_optimizers

    def reload_model_params(self, state_dict: Any = None) -> None:
        for each in self.chained_optimizers:
            each.reload_model_params()


class LayerWiseDistributedOptimizer(ChainedOptimizer):
    """Shares out whole parameters: this rank's optimizers have every second one."""

    def __init__(self, optimizers: Any, config: Any, pg_collection: Any = None, init_state_fn_list: Any = None) -> None:
        parameters = [each for one in optimizers for group in one.param_groups for each in group["params"]]
        self.dp_cp_params_list, self.expt_dp_params_list = [parameters[::2], parameters[1::2]], None
        for one in optimizers:
            one.param_groups[0]["params"] = [
                each for each in one.param_groups[0]["params"] if any(each is mine for mine in parameters[::2])
            ]
        super().__init__([Float16OptimizerWithFloat16Params(one, config, None, None) for one in optimizers])

    def load_state_dict(self, state_dict: Any) -> None:
        for child, state in zip(self.chained_optimizers, state_dict, strict=True):
            child.load_state_dict(state)


@dataclass
class Range:
    start: int
    end: int


class DistributedOptimizer(MixedPrecisionOptimizer):
    """A rank's masters are those of its part of the parameters, laid end to end: some it shares, some it has not."""

    def __init__(
        self,
        optimizer: Any,
        config: Any,
        grad_scaler: Any,
        init_state_fn: Any,
        model_chunks: Any,
        per_model_buffers: Any,
        data_parallel_group: Any,
        data_parallel_group_gloo: Any,
        data_parallel_group_idx: Any,
        distributed_optimizer_instance_id: Any,
    ) -> None:
        super().__init__(optimizer, config)
        self.model_chunks = model_chunks
        self.ddp_config = getattr(config, "ddp_config", None)
        trained = [each for chunk in model_chunks for each in chunk.parameters() if each.requires_grad]
        self.buffers = [SimpleNamespace(param_to_bucket=dict.fromkeys(trained))]
        rank, size = data_parallel_group
        whole = sum(each.numel() for each in trained)
        begin, end = whole * rank // size, whole * (rank + 1) // size
        self._ranges: dict[int, Range] = {}
        self.model_float16_groups: list[list[Any]] = [[]]
        self.shard_float16_groups: list[list[Any]] = [[]]
        self.shard_fp32_from_float16_groups: list[list[Any]] = [[]]
        self.model_fp32_groups: list[list[Any]] = [[]]
        self.shard_fp32_groups: list[list[Any]] = [[]]
        at = 0
        for parameter in trained:
            start, stop = max(begin - at, 0), min(end - at, parameter.numel())
            at += parameter.numel()
            if start < stop:
                self._ranges[id(parameter)] = Range(start, stop)
                self._add(parameter, start, stop)
        self.optimizer.param_groups = [{"params": self.shard_fp32_from_float16_groups[0] + self.shard_fp32_groups[0]}]
        if hasattr(optimizer, "take"):  # HybridDeviceOptimizer makes copies of what it is given
            optimizer.take(self.shard_fp32_from_float16_groups[0])

    def _add(self, parameter: torch.Tensor, start: int, stop: int) -> None:
        quantized = isinstance(parameter, QuantizedTensor)
        shard = (parameter.float() if quantized else parameter.detach()).view(-1)[start:stop]
        if not is_16_bit(parameter):
            self.model_fp32_groups[0].append(parameter)
            self.shard_fp32_groups[0].append(shard)
            return
        self.model_float16_groups[0].append(parameter)
        self.shard_float16_groups[0].append(shard)
        precision_aware = hasattr(self.optimizer, "name_to_dtype_map")
        self.shard_fp32_from_float16_groups[0].append(None if precision_aware else shard.clone().float())

    def _get_model_param_range_map(self, parameter: torch.Tensor) -> dict[str, Range]:
        return {"param": self._ranges[id(parameter)]}

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        if getattr(self.ddp_config, "use_megatron_fsdp", False):  # up to 0.13
            for parameter, start, stop, main in masters_of(self):
                main.copy_(parameter.detach().view(-1)[start:stop])
        elif not hasattr(self.optimizer, "name_to_dtype_map"):
            for parameter, main in zip(
                self.model_float16_groups[0], self.shard_fp32_from_float16_groups[0], strict=True
            ):
                range_ = self._ranges[id(parameter)]
                main.copy_(parameter.detach().float().reshape(-1)[range_.start : range_.end])

    @staticmethod
    def _normalize_state_dict_for_grouped_params(state_dict: Any, model_chunk: Any) -> None:
        """Rewrites the names of another implementation, as upstream's does from 0.18 on."""
        for key in [key for key in state_dict if key.endswith(".fused")]:
            state_dict[key.removesuffix(".fused")] = state_dict.pop(key)

    def load_state_dict(self, state_dict: Any) -> None:
        if "param_state" in state_dict:
            self._restore(state_dict["param_state"])

    def load_parameter_state_from_dp_zero(self, state_dict: Any, *, update_legacy_format: bool = False) -> None:
        self._restore(state_dict)

    def _restore(self, masters: Iterable[torch.Tensor]) -> None:
        for main, saved in zip(self.shard_fp32_from_float16_groups[0], masters, strict=True):
            main.copy_(saved.view(main.shape))
        if hasattr(self.optimizer, "restored"):
            self.optimizer.restored()


class FusedAdam:
    """Where Transformer Engine's keeps masters: in its state, in one of three forms, once there is a state."""

    def __init__(self, form: str = "fp32") -> None:
        self.param_groups: Any = []
        self.state: dict[torch.Tensor, dict[str, Any]] = _Default()
        self.store_param_remainders = form == "remainders"
        self.name_to_dtype_map = {"master_param": torch.float16 if form == "fp16" else torch.float32}
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = _Default()

    def initialize_state(self, shard: torch.Tensor, store_param_remainders: bool) -> None:
        dtype = torch.int16 if store_param_remainders else self.name_to_dtype_map["master_param"]
        self.state[shard]["master_param"] = torch.zeros(shard.shape, dtype=dtype)
        if not store_param_remainders:
            self.set_scaled_state(shard, "master_param", shard.float())

    def set_scaled_state(self, shard: torch.Tensor, name: str, values: torch.Tensor) -> None:
        if self.name_to_dtype_map[name] is torch.float16:
            largest = torch.where(values.isfinite(), values.abs(), 0).max()
            self._scales[shard][name] = scale = torch.where(largest > 0, largest / 32752, 1.0)
            values = values.div_(scale)
        self.state[shard][name].copy_(values)

    def get_unscaled_state(self, shard: torch.Tensor, name: str) -> torch.Tensor:
        held = self.state[shard][name].float()
        return held * self._scales[shard][name] if shard in self._scales else held


class _Default(dict):  # type: ignore[type-arg]
    """Of dicts, by identity: tensors have no truth of equality."""

    def __missing__(self, key: Any) -> Any:
        self[key] = {}
        return self[key]


class HybridDeviceOptimizer:
    """Steps fp32 copies of the masters that it was given."""

    def __init__(self) -> None:
        self.param_groups: Any = []
        self.param_to_inner_param: dict[torch.Tensor, torch.Tensor] = {}
        self.state: dict[torch.Tensor, dict[str, Any]] = {}

    def take(self, mains: Iterable[torch.Tensor]) -> None:
        self.param_to_inner_param = {main: main.clone() for main in mains}

    def restored(self) -> None:
        """What comes from a checkpoint is in another tensor than what is stepped, up to the next step."""
        self.state = {main: {"master_param": main.clone()} for main in self.param_to_inner_param}


def distributed(model: Any, inner: Any = None, rank: int = 0, size: int = 1, **config: Any) -> DistributedOptimizer:
    chunks = model if isinstance(model, list) else [model]
    inner = SimpleNamespace(param_groups=[]) if inner is None else inner
    group = (rank, size)
    return DistributedOptimizer(inner, SimpleNamespace(**config), None, None, chunks, {}, group, None, 0, 0)


def plain(model: Any) -> Float16OptimizerWithFloat16Params:
    chunks = model if isinstance(model, list) else [model]
    trained = [each for chunk in chunks for each in chunk.parameters() if each.requires_grad]
    inner = SimpleNamespace(param_groups=[{"params": trained}])
    return Float16OptimizerWithFloat16Params(inner, SimpleNamespace(), None, None)


def masters_of(optimizer: Any) -> Iterator[tuple[torch.Tensor, int, int, torch.Tensor]]:
    """Parameter, range and flat master of all on this rank, found without help of the package under test."""
    if hasattr(optimizer, "chained_optimizers"):
        for child in optimizer.chained_optimizers:
            yield from masters_of(child)
    elif getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False):
        for chunk in optimizer.model_chunks:
            for group in chunk.param_and_grad_buffer.parameter_groups:
                for index, parameter in enumerate(group.params if group.main_weight_buffer else ()):
                    main = group.main_weight_buffer.get_item(index)
                    yield parameter, 0, parameter.numel(), main
    elif isinstance(optimizer, DistributedOptimizer):
        inner = optimizer.optimizer
        groups = (optimizer.model_float16_groups, optimizer.shard_float16_groups)
        mains = optimizer.shard_fp32_from_float16_groups[0]
        for parameter, shard, main in zip(groups[0][0], groups[1][0], mains, strict=True):
            range_ = optimizer._ranges[id(parameter)]
            if main is None:
                main = _in_adam(inner, shard)
            yield parameter, range_.start, range_.end, getattr(inner, "param_to_inner_param", {}).get(main, main)
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for group, mains in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            for parameter, main in zip(group, mains, strict=True):
                yield parameter, 0, parameter.numel(), main.view(-1)


def _in_adam(adam: FusedAdam, shard: torch.Tensor) -> torch.Tensor:
    if "master_param" not in adam.state.get(shard, {}):
        return shard.float()
    if not getattr(adam, "store_param_remainders", False):
        return adam.get_unscaled_state(shard, "master_param")
    low = adam.state[shard]["master_param"].to(torch.int32)
    high = shard.contiguous().view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


# ------------------------------------------------------------------------------------------------------------ installed

MODULES: Mapping[str, Mapping[str, Any]] = {
    "megatron": {},
    "megatron.core": {},
    "megatron.core.transformer": {},
    "megatron.core.transformer.module": {"MegatronModule": MegatronModule},
    "megatron.core.dist_checkpointing": {"load": load},
    "megatron.core.dist_checkpointing.serialization": {"load": load},
    "megatron.core.dist_checkpointing.strategies": {},
    "megatron.core.dist_checkpointing.strategies.torch": {"TorchDistLoadShardedStrategy": TorchDistLoadShardedStrategy},
    "megatron.core.dist_checkpointing.strategies.tensorstore": {
        "TensorStoreLoadShardedStrategy": TensorStoreLoadShardedStrategy
    },
    "megatron.core.dist_checkpointing.strategies.fully_parallel": {
        "FullyParallelLoadStrategyWrapper": FullyParallelLoadStrategyWrapper
    },
    "megatron.core.optimizer": {},
    "megatron.core.optimizer.optimizer": {
        "MixedPrecisionOptimizer": MixedPrecisionOptimizer,
        "Float16OptimizerWithFloat16Params": Float16OptimizerWithFloat16Params,
        "FP32Optimizer": FP32Optimizer,
        "ChainedOptimizer": ChainedOptimizer,
    },
    "megatron.core.optimizer.distrib_optimizer": {"DistributedOptimizer": DistributedOptimizer},
    "megatron.core.optimizer.layer_wise_optimizer": {"LayerWiseDistributedOptimizer": LayerWiseDistributedOptimizer},
    "transformer_engine": {},
    "transformer_engine.pytorch": {},
    "transformer_engine.pytorch.tensor": {"QuantizedTensor": QuantizedTensor},
}


@contextmanager
def installed(version: str = "0.19.2") -> Iterator[None]:
    """The modules are imported inside, in place of a megatron-core that may be installed."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("megatron", "transformer_engine")]:
            monkeypatch.delitem(sys.modules, name)
        for name, content in MODULES.items():
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
        sys.modules["megatron.core"].__version__ = version  # type: ignore[attr-defined]
        forget()
        yield


@contextmanager
def patched() -> Iterator[None]:
    """With the patch inside, and nothing left of it afterwards. To be used inside of :func:`installed`."""
    from mcore_patch.compat import line_named

    import mcore_patch
    from mcore_patch._engine import patching
    from mcore_patch._patches import WRAPPERS

    with pytest.MonkeyPatch.context() as monkeypatch:
        # 0.16 has no zarr, so that the gate would leave it alone.
        wrapper = WRAPPERS["tensorstore_load"](TensorStoreLoadShardedStrategy.load, line_named("0.15"))
        monkeypatch.setattr(TensorStoreLoadShardedStrategy, "load", wrapper)
        # What status() looks for through all objects of the process, which takes longer than most tests.
        monkeypatch.setattr(patching, "holders_of", lambda _: ())
        try:
            mcore_patch.apply()
            yield
        finally:
            mcore_patch.revert()
            forget()


def forget() -> None:
    """Everything that one run leaves behind."""
    from mcore_patch._stations import guard
    from mcore_patch._stations.remember import memory
    from mcore_patch._stations.report import reporter

    CHECKPOINTS.clear()
    TOO_WIDE.clear()
    guard._said.clear()
    memory.clear()
    reporter.clear()


@contextmanager
def stock() -> Iterator[None]:
    """The patch, which is in place, passes every call through."""
    from mcore_patch._engine import ENGINE

    records = list(ENGINE._records.values())
    for record in records:
        record.active = False
    try:
        yield
    finally:
        for record in records:
            record.active = True
