"""Every kind of pipeline, over the stand-in for megatron-core: each builds a model and an optimizer, and loads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import tiny
import torch
import torch.distributed.checkpoint as dcp


class Net(tiny.MegatronModule):
    """Parameters of several shapes, two of them one, one frozen, one empty, one fp32 among 16-bit ones."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(SimpleNamespace(bf16=True))
        self.module = torch.nn.ModuleDict(
            {"embedding": torch.nn.Embedding(5, 3), "linear": torch.nn.Linear(3, 4), "output": torch.nn.Linear(3, 5)}
        )
        self.module["output"].weight = self.module["embedding"].weight
        self.frozen = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.zeros(0))
        self.register_buffer("buffer", torch.zeros(2))
        self.to(dtype)
        self.norm = torch.nn.LayerNorm(3)
        seeded = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for each in [*self.parameters(), *self.buffers()]:
                each.copy_(torch.randn(each.shape, generator=seeded))

    def forward(self, x: torch.Tensor) -> Any:
        return self.module["linear"](self.norm(x.float()).to(torch.bfloat16))


def checkpoint(model: torch.nn.Module, seed: int = 2) -> tiny.Tensors:
    """fp32 values for all that the model has, none of them exact in 16 bits; one on a tie between two bf16 values."""
    seeded = torch.Generator().manual_seed(seed)
    tied: dict[int, torch.Tensor] = {}
    found = {}
    for name, each in model.state_dict(keep_vars=True).items():
        tied.setdefault(id(each), torch.randn(each.shape, generator=seeded))
        found[name] = tied[id(each)].clone()
        found[name].reshape(-1)[:1] = 1.00390625
    return found


class Strange:
    """An optimizer of a user's own class."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.param_groups = [{"params": parameters}]

    def reload_model_params(self, state_dict: Any = None) -> None: ...


Pipeline = Callable[[], tuple[Any, Any]]


def _torch(build: Callable[..., Any] = tiny.distributed, **how: Any) -> tuple[torch.nn.Module, Any]:
    model = Net()
    optimizer = build(model, **how)
    model.load_state_dict(checkpoint(model))
    optimizer.reload_model_params()
    return model, optimizer


def torch_rank_0() -> Any:
    return _torch(rank=0, size=2)


def torch_rank_1() -> Any:
    return _torch(rank=1, size=2)


def torch_plain() -> Any:
    return _torch(tiny.plain)


def torch_weights_first() -> Any:
    model = Net()
    model.load_state_dict(checkpoint(model))
    return model, tiny.distributed(model)


def weights_before_the_cast() -> Any:
    model = Net(torch.float32)
    model.load_state_dict(checkpoint(model))
    cast = tiny.Float16Module(model, torch.bfloat16)
    return model, tiny.plain(cast)


def weights_before_a_swapping_cast() -> Any:
    with tiny.swapping():
        return weights_before_the_cast()


def _dist(strategy: Any = None, write: bool = True, strict: Any = None) -> Any:
    model = Net()
    optimizer = tiny.distributed(model, size=2)
    tiny.CHECKPOINTS["disk"] = checkpoint(model)
    state = {"model": model.sharded_state_dict(), "version": 3, "list": [1, (2, 3)]}
    loaded = tiny.load_by_name(state, "disk", strategy, strict=strict)
    if write:
        model.load_state_dict((loaded[0] if strict else loaded)["model"])
    optimizer.reload_model_params()
    return model, optimizer


def dist() -> Any:
    return _dist()


def dist_short_of_memory() -> Any:
    tiny.TOO_WIDE["module.linear.weight"] = MemoryError()
    return _dist()


def dist_quantized(strategy: Any = None) -> Any:
    """From real files: the target is quantized, so the checkpoint is read beside the load."""
    model = _quantized_model()
    optimizer = tiny.distributed(model, size=2)
    with tempfile.TemporaryDirectory() as folder:
        tiny.CHECKPOINTS[folder] = checkpoint(model)
        dcp.save(dict(tiny.CHECKPOINTS[folder]), checkpoint_id=folder, no_dist=True)
        loaded = tiny.load_by_name({"model": model.sharded_state_dict()}, folder, strategy)
    model.load_state_dict(loaded["model"])
    optimizer.reload_model_params()
    return model, optimizer


class MetadataUnreadable(tiny.TorchDistLoadShardedStrategy):
    """As torch_dist's in 0.19 on a torch that keeps more of a tensor than torch.empty() takes."""

    def load_tensors_metadata(self, checkpoint_dir: str) -> dict[str, Any]:
        raise TypeError


def dist_quantized_and_metadata_unreadable() -> Any:
    return dist_quantized(MetadataUnreadable())


def dist_with_mismatches_returned() -> Any:
    return _dist(strict="return_all")


def dist_in_place() -> Any:
    return _dist(write=False)


def dist_fully_parallel() -> Any:
    return _dist(tiny.FullyParallelLoadStrategyWrapper(tiny.TorchDistLoadShardedStrategy()))


def zarr() -> Any:
    return _dist(tiny.TensorStoreLoadShardedStrategy())


def zarr_not_on_device() -> Any:
    return _dist(tiny.TensorStoreLoadShardedStrategy(load_directly_on_device=False))


def _given(build: Callable[..., Any], state: Callable[[tiny.Tensors], Any], **how: Any) -> Any:
    model = Net()
    optimizer = build(model, **how)
    whole = checkpoint(model)
    model.load_state_dict({name: each.bfloat16() for name, each in whole.items()})
    try:
        optimizer.reload_model_params(state(whole))
    except AssertionError:  # as upstream, where it takes no state dict
        optimizer.reload_model_params()
    return model, optimizer


def given() -> Any:
    return _given(tiny.distributed, lambda whole: {"model": {f"module.{key}": each for key, each in whole.items()}})


def given_to_the_plain_one() -> Any:
    return _given(tiny.plain, lambda whole: whole)


def given_to_a_chain_with_a_stranger() -> Any:
    def chain(model: Net) -> Any:
        return tiny.ChainedOptimizer(
            [tiny.distributed(model), tiny.FP32Optimizer(None), Strange(list(Net().parameters()))]
        )

    return _given(chain, lambda whole: whole)


def given_under_other_names() -> Any:
    return _given(tiny.distributed, lambda whole: {f"{key}.fused": each for key, each in whole.items()})


def reload_twice() -> Any:
    model, optimizer = torch_rank_0()
    optimizer.reload_model_params()
    return model, optimizer


def two_loads() -> Any:
    model = Net()
    optimizer = tiny.distributed(model)
    model.load_state_dict(checkpoint(model, 3))
    model.load_state_dict({name: each.bfloat16() for name, each in checkpoint(model).items()})
    optimizer.reload_model_params()
    return model, optimizer


def two_optimizers() -> Any:
    model, first = torch_weights_first()
    second = tiny.distributed(model)
    del first
    return model, second


def changed_after_the_load() -> Any:
    model = Net()
    optimizer = tiny.distributed(model)
    model.load_state_dict(checkpoint(model))
    with torch.no_grad():
        model.norm.weight.add_(1)
        model.module["linear"].weight.add_(1)
    optimizer.reload_model_params()
    return model, optimizer


def forward_then_reload() -> Any:
    model, optimizer = torch_rank_0()
    model(torch.zeros(1, 3))
    optimizer.reload_model_params()
    return model, optimizer


def optimizer_state_without_masters() -> Any:
    model = Net()
    optimizer = tiny.distributed(model)
    model.load_state_dict(checkpoint(model))
    optimizer.load_state_dict({})
    return model, optimizer


def _saved(optimizer: Any) -> list[torch.Tensor]:
    return [torch.full_like(main, 7.7) for _, _, _, main in tiny.masters_of(optimizer)]


def optimizer_state() -> Any:
    model, optimizer = torch_rank_0()
    optimizer.load_state_dict({"param_state": _saved(optimizer)})
    return model, optimizer


def optimizer_state_from_dp_zero() -> Any:
    model, optimizer = torch_rank_0()
    optimizer.load_parameter_state_from_dp_zero(_saved(optimizer))
    return model, optimizer


def optimizer_state_of_the_plain_one() -> Any:
    model, optimizer = torch_plain()
    optimizer.load_state_dict({"masters": _saved(optimizer)})
    return model, optimizer


def optimizer_state_of_a_hybrid_one() -> Any:
    model, optimizer = _torch(inner=tiny.HybridDeviceOptimizer())
    optimizer.load_state_dict({"param_state": _saved(optimizer)})
    return model, optimizer


def layer_wise() -> Any:
    model = Net()
    trained = [each for each in model.parameters() if each.requires_grad]
    inner = SimpleNamespace(param_groups=[{"params": trained}])
    optimizer = tiny.LayerWiseDistributedOptimizer([inner], SimpleNamespace())
    model.load_state_dict(checkpoint(model))
    optimizer.reload_model_params()
    model.load_state_dict(checkpoint(model))
    optimizer.load_state_dict([child.state_dict() for child in optimizer.chained_optimizers])
    return model, optimizer


def chain_with_a_stranger() -> Any:
    model, other = Net(), Net()
    optimizer = tiny.ChainedOptimizer(
        [tiny.distributed(model), tiny.FP32Optimizer(None), Strange(list(other.parameters()))]
    )
    model.load_state_dict(checkpoint(model))
    optimizer.reload_model_params()
    return model, optimizer


def precision_aware() -> Any:
    return _torch(inner=tiny.FusedAdam())


def precision_aware_fp16() -> Any:
    return _torch(inner=tiny.FusedAdam("fp16"))


def remainders() -> Any:
    return _torch(inner=tiny.FusedAdam("remainders"))


def remainders_reloaded() -> Any:
    model, optimizer = remainders()
    optimizer.reload_model_params()
    return model, optimizer


def fp16_masters_reloaded() -> Any:
    model, optimizer = precision_aware_fp16()
    optimizer.reload_model_params()
    model.load_state_dict({name: each.bfloat16() for name, each in checkpoint(model).items()})
    optimizer.reload_model_params()
    return model, optimizer


def hybrid() -> Any:
    return _torch(inner=tiny.HybridDeviceOptimizer())


def _quantized_model() -> Net:
    model = Net()
    linear = model.module["linear"]
    linear.weight = torch.nn.Parameter(tiny.Float8Tensor(linear.weight.detach().float()))
    linear.weight.get_high_precision_init_val = lambda: None
    linear.weight.clear_high_precision_init_val = lambda: None
    return model


def quantized() -> Any:
    model = _quantized_model()
    optimizer = tiny.plain(model)
    model.load_state_dict(checkpoint(model))
    optimizer.reload_model_params()
    return model, optimizer


def quantized_weights_first() -> Any:
    model = _quantized_model()
    model.load_state_dict(checkpoint(model))
    return model, tiny.distributed(model, size=2)


class Float4Tensor(tiny.QuantizedTensor):
    """A class that is not known."""


def quantized_in_an_unknown_way() -> Any:
    model = Net()
    linear = model.module["linear"]
    linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Float4Tensor))
    optimizer = tiny.plain(model)
    model.load_state_dict(checkpoint(model))
    optimizer.reload_model_params()
    return model, optimizer


class Buffer:
    """Megatron-FSDP's: a rank has its part of the parameters of a group, laid end to end."""

    def __init__(self, parameters: list[torch.nn.Parameter], shard: bool) -> None:
        self.is_data_distributed, self._of = shard, parameters
        self._mains = [each.detach().clone().float() for each in parameters]

    def locate_item_in_global_item(self, index: int) -> tuple[int, int]:
        return (0, self._of[index].numel()) if index != 1 else (0, 0)

    def get_item(self, index: int, only_shard: bool = False) -> torch.Tensor:
        return self._mains[index].view(-1)


def under_fsdp() -> Any:
    model = Net()
    narrow = [each for each in model.parameters() if tiny.is_16_bit(each) and each.requires_grad]
    whole, shared = SimpleNamespace(is_data_distributed=False), SimpleNamespace(is_data_distributed=True)
    model.param_and_grad_buffer = SimpleNamespace(
        parameter_groups=[
            SimpleNamespace(params=[model.norm.weight], main_weight_buffer=None, model_weight_buffer=whole),
            SimpleNamespace(params=narrow, main_weight_buffer=Buffer(narrow, True), model_weight_buffer=whole),
            SimpleNamespace(params=narrow[:1], main_weight_buffer=Buffer(narrow[:1], True), model_weight_buffer=shared),
        ]
    )
    optimizer = tiny.distributed(model, ddp_config=SimpleNamespace(use_megatron_fsdp=True))
    model.load_state_dict(checkpoint(model))
    optimizer.reload_model_params()
    return model, optimizer


def quantized_without_a_load() -> Any:
    model = _quantized_model()
    optimizer = tiny.distributed(model)
    model.module["linear"].weight.data.copy_(torch.ones(4, 3))
    optimizer.reload_model_params()
    return model, optimizer


PIPELINES: dict[str, Pipeline] = {
    pipeline.__name__: pipeline
    for pipeline in (
        torch_rank_0,
        torch_rank_1,
        torch_plain,
        torch_weights_first,
        weights_before_the_cast,
        weights_before_a_swapping_cast,
        dist,
        dist_with_mismatches_returned,
        dist_in_place,
        dist_fully_parallel,
        given,
        given_to_the_plain_one,
        given_to_a_chain_with_a_stranger,
        given_under_other_names,
        dist_short_of_memory,
        dist_quantized,
        dist_quantized_and_metadata_unreadable,
        reload_twice,
        two_loads,
        two_optimizers,
        changed_after_the_load,
        forward_then_reload,
        optimizer_state_without_masters,
        optimizer_state,
        optimizer_state_from_dp_zero,
        optimizer_state_of_the_plain_one,
        optimizer_state_of_a_hybrid_one,
        layer_wise,
        chain_with_a_stranger,
        precision_aware,
        precision_aware_fp16,
        remainders,
        remainders_reloaded,
        fp16_masters_reloaded,
        hybrid,
        quantized,
        quantized_weights_first,
        quantized_without_a_load,
        quantized_in_an_unknown_way,
        under_fsdp,
        zarr,
        zarr_not_on_device,
    )
}


Bits = list[bytes]


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().as_subclass(torch.Tensor).contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy())


def in_fp16(master: torch.Tensor) -> torch.Tensor:
    """A flat fp32 tensor, as FusedAdam's scaled fp16 masters can hold it."""
    adam = tiny.FusedAdam("fp16")
    adam.initialize_state(master, False)
    return adam.get_unscaled_state(master, "master_param")


def run(name: str) -> tuple[Bits, Bits, Bits]:
    """The bits of the model, of each master on this rank, and of what its parameter holds there, in fp32."""
    model, optimizer = PIPELINES[name]()
    left = [bits(each) for each in [*model.parameters(), *model.buffers()]]
    masters, values = [], []
    for parameter, start, stop, main in tiny.masters_of(optimizer):
        masters.append(bits(main))
        value = parameter.detach().as_subclass(torch.Tensor).float().reshape(-1)[start:stop]
        if name == "precision_aware_fp16":  # as well as that form can hold it
            value = in_fp16(value)
        values.append(bits(value))
    return left, masters, values
