"""A small GPT with fp8 parameters, for whatever megatron-core and Transformer Engine are on the path.

Import it after :func:`standins.install.stand_in_for_transformer_engine`, but never at the top of a ``__main__``:
a process that saves a ``torch_dist`` checkpoint spawns another one, which imports ``__main__`` again, without the
stand-ins.

In a rank (``mcore_patch.testing.run_ranks``), compose ``initialize``, ``build_model``, ``wrap``, ``build_optimizer``,
``reference``, ``load``, ``masters``, ``differing`` and ``train_step``; ``fp8_cases.py`` shows how.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
import transformer_engine.pytorch as te
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from transformer_engine.common.recipe import DelayedScaling

HIDDEN = 128
HEADS = 4
VOCABULARY = 128
SEQUENCE = 32
BATCH = 4

Recipe = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]


@dataclass(frozen=True)
class Options:
    """What to build. The defaults are the sharpest case: the scales of ``tensorwise`` are no powers of two."""

    recipe: Recipe | None = "tensorwise"
    """None: a plain model of *dtype*, of the same Transformer Engine modules."""
    dtype: torch.dtype = torch.bfloat16
    experts: int | None = None
    expert_parallel: int = 1
    precision_aware: bool = False
    """Transformer Engine's FusedAdam holds the masters (if the release lets it do so with this recipe)."""
    store_param_remainders: bool = False
    main_params_dtype: torch.dtype = torch.float32


@dataclass
class Pipeline:
    """A model as a training loop holds it."""

    options: Options
    chunk: Any
    """The DistributedDataParallel module."""
    optimizer: Any

    @property
    def model(self) -> Any:
        return unwrapped(self.chunk)


@dataclass(frozen=True)
class MasterOf:
    """One rank's master of one parameter, or of the part of it that this rank owns."""

    name: str
    parameter: torch.nn.Parameter
    values: torch.Tensor
    """fp32, flat; not the master itself where Transformer Engine holds that in another form."""
    start: int
    """The first element of the flat parameter that the master holds."""

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.detach().float().reshape(-1)[self.start : self.start + self.values.numel()]


# --------------------------------------------------------------------------------------------------------------- build


def accepted(function: Callable[..., Any], **kwargs: Any) -> dict[str, Any]:
    """Those of *kwargs* that *function* takes in this release."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in known}


def initialize(options: Options) -> None:
    """Sets megatron-core up in this rank; torch.distributed is initialised already."""
    parallel_state.initialize_model_parallel(expert_model_parallel_size=options.expert_parallel)
    model_parallel_cuda_manual_seed(1)


def transformer_config(options: Options) -> TransformerConfig:
    fields: dict[str, Any] = {}
    if options.recipe is not None:
        fields = {"fp8": "hybrid", "fp8_recipe": options.recipe, "fp8_param": True}
    if options.experts is not None:
        fields |= {
            "num_moe_experts": options.experts,
            "expert_model_parallel_size": options.expert_parallel,
            "moe_grouped_gemm": True,
            "moe_router_topk": 2,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
        }
    return TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        # Grouped matrix products take no biases.
        add_bias_linear=options.experts is None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=options.dtype,
        pipeline_dtype=options.dtype,
        bf16=options.dtype is torch.bfloat16,
        # On the CPU, Transformer Engine would keep uninitialised memory as the high-precision initial value.
        use_cpu_initialization=False,
        **accepted(TransformerConfig, **fields, **_unfused_attention()),
    )


def _unfused_attention() -> dict[str, Any]:
    """The attention in plain torch, which releases choose by a field or, earlier, by the environment."""
    if "attention_backend" in inspect.signature(TransformerConfig).parameters:
        from megatron.core.transformer.enums import AttnBackend

        return {"attention_backend": AttnBackend.unfused}
    os.environ.update(NVTE_FLASH_ATTN="0", NVTE_FUSED_ATTN="0", NVTE_UNFUSED_ATTN="1")
    return {}


def build_model(options: Options) -> Any:
    config = transformer_config(options)
    spec = specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=options.experts, moe_grouped_gemm=options.experts is not None
    )
    with contextlib.ExitStack() as stack:
        if options.recipe is not None and not hasattr(config, "fp8_param"):
            # Up to 0.11, it is the caller who asks Transformer Engine for fp8 parameters.
            if options.recipe != "delayed":
                release = metadata.version("megatron-core")
                raise ValueError(f"megatron-core {release} knows the recipe 'delayed' only, found {options.recipe!r}")
            recipe = accepted(te.fp8_model_init, recipe=DelayedScaling())
            stack.enter_context(te.fp8_model_init(enabled=True, **recipe))
        return GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            share_embeddings_and_output_weights=True,
        )


def wrap(options: Options, model: Any) -> Any:
    if model.config.bf16:
        model = Float16Module(model.config, model)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        **accepted(
            DistributedDataParallelConfig,
            fp8_param_gather=options.recipe is not None,
            **_gather_of_mxfp8(options),
        ),
    )
    return DistributedDataParallel(model.config, ddp_config, model)


def _gather_of_mxfp8(options: Options) -> dict[str, bool]:
    """MXFP8 parameters cannot lie in a buffer: they are gathered as bf16, through the gradients' buffer."""
    return {"reuse_grad_buf_for_mxfp8_param_ag": options.recipe == "mxfp8"}


def build_optimizer(options: Options, chunk: Any) -> Any:
    # 0.13 builds a FusedAdam that never steps unless a recipe is named; "delayed" is the default of the command line.
    fields: dict[str, Any] = {"fp8_recipe": options.recipe or "delayed", **_gather_of_mxfp8(options)}
    if options.precision_aware:
        fields |= {
            "use_precision_aware_optimizer": True,
            "main_params_dtype": options.main_params_dtype,
            "store_param_remainders": options.store_param_remainders,
        }
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=options.dtype is torch.bfloat16,
        params_dtype=options.dtype,
        use_distributed_optimizer=True,
        **accepted(OptimizerConfig, **fields),
    )
    return get_megatron_optimizer(config, [chunk])


def build(options: Options) -> Pipeline:
    """All of it, in the usual order. :func:`initialize` comes first."""
    chunk = wrap(options, build_model(options))
    return Pipeline(options, chunk, build_optimizer(options, chunk))


def unwrapped(module: Any) -> Any:
    while isinstance(module, DistributedDataParallel | Float16Module):
        module = module.module
    return module


# -------------------------------------------------------------------------------------------------- checkpoints, loads


def reference(model: Any, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """A state dict for *model*: of *dtype*, known by the names, and not on the grid of any fp8 format.

    Ranks that hold the same parameter get the same values. With fp32, few values are exact in bf16.
    """
    state = {}
    for name, parameter in model.named_parameters():
        place = [name]
        if ".experts." in name:
            place.append(str(parallel_state.get_expert_model_parallel_rank()))
        seed = int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:7], "big")
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        is_gain = "norm" in name and name.endswith("weight")
        state[name] = (noise * 0.05 + float(is_gain)).to(dtype)
    return state


def load(model: Any, state: dict[str, torch.Tensor]) -> None:
    """``load_state_dict`` of a state dict that has all parameters, and none of the modules' extra state."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all(name.endswith("_extra_state") for name in missing), missing


def save_distributed(model: Any, folder: Path) -> None:
    """A ``torch_dist`` checkpoint. Of a plain model: what a saver on a CPU writes of fp8 tensors is a pickle."""
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(folder))


def load_distributed(model: Any, folder: Path, strategy: Any = None) -> dict[str, Any]:
    """Loads *folder* into *model* as Megatron-LM does; returns the loaded state dict (``{"model": ...}``)."""
    state = dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder), strategy))
    model.load_state_dict(state["model"], strict=False)
    return state


# ------------------------------------------------------------------------------------------------------------- measure


def is_fp8(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "_quantizer") or hasattr(parameter, "from_float8")


def dequantized(parameter: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A parameter's values, in *dtype*; plain parameters too."""
    if not is_fp8(parameter):
        return parameter.detach().to(dtype)
    detached: Any = parameter.detach()
    # 1.x has a ``dequantize`` as well, with another signature.
    return detached.from_float8(dtype) if hasattr(detached, "from_float8") else detached.dequantize(dtype=dtype)


def masters(pipeline: Pipeline) -> Iterator[MasterOf]:
    """The masters on this rank. Those that FusedAdam makes at its first step are made here, as it makes them."""
    names = {id(parameter): name for name, parameter in pipeline.model.named_parameters()}
    for part in getattr(pipeline.optimizer, "chained_optimizers", [pipeline.optimizer]):
        groups = (part.model_float16_groups, part.shard_float16_groups, part.shard_fp32_from_float16_groups)
        for parameters, shards, mains in zip(*groups, strict=True):
            for parameter, shard, main in zip(parameters, shards, mains, strict=True):
                start = part._get_model_param_range_map(parameter)["param"].start
                values = _held_by_te(part.optimizer, shard) if main is None else main.detach()
                yield MasterOf(names[id(parameter)], parameter, values.float().reshape(-1), start)
        for parameters, mains in zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True):
            for parameter, main in zip(parameters, mains, strict=True):
                start = part._get_model_param_range_map(parameter)["param"].start
                yield MasterOf(names[id(parameter)], parameter, main.detach().reshape(-1), start)


def _held_by_te(adam: Any, shard: torch.Tensor) -> torch.Tensor:
    remainders = getattr(adam, "store_param_remainders", False) and shard.dtype is torch.bfloat16
    if not adam.state[shard]:
        # 2.1 gave the method a second argument.
        extra = {"store_param_remainders": remainders}
        adam.initialize_state(shard, **accepted(adam.initialize_state, **extra))
    if not remainders:
        unscaled: torch.Tensor = adam.get_unscaled_state(shard, "master_param")
        return unscaled
    low = adam.state[shard]["master_param"].int()
    # The parameter is the high half, rounded half away. (Of fp8 parameters, too; its step fails then.)
    high = dequantized(shard, torch.bfloat16).view(torch.int16).int() - (low < 0).int()
    return ((high << 16) | (low & 0xFFFF)).view(torch.float32)


@dataclass(frozen=True)
class Count:
    """Elements, on all ranks together unless said otherwise."""

    differing: int
    total: int

    def __str__(self) -> str:
        return f"{self.differing}/{self.total}"


def differing(
    pipeline: Pipeline,
    expected: Callable[[str, torch.nn.Parameter], torch.Tensor],
    chosen: Callable[[torch.nn.Parameter], bool] = lambda _: True,
) -> Count:
    """Elements of the masters of *chosen* parameters whose fp32 bits are not those of *expected*, over all ranks."""
    counts = torch.zeros(2, dtype=torch.int64)
    for master in masters(pipeline):
        if chosen(master.parameter):
            whole = master.part_of(expected(master.name, master.parameter))
            counts[0] += (master.values.view(torch.int32) != whole.contiguous().view(torch.int32)).sum()
            counts[1] += whole.numel()
    torch.distributed.all_reduce(counts)
    return Count(int(counts[0]), int(counts[1]))


def set_masters(pipeline: Pipeline, state: dict[str, torch.Tensor]) -> None:
    """Writes *state* into the masters: what to train from without the defect.

    ValueError where the masters are not held as fp32.
    """
    for master in masters(pipeline):
        master.values.copy_(master.part_of(state[master.name]))
    if differing(pipeline, lambda name, _: state[name]).differing:
        raise ValueError("these masters cannot be set by hand: they are remainders, or scaled fp16")


def train_step(pipeline: Pipeline) -> float:
    """One step, on a batch that is the same each time; returns the loss before it, the mean over the ranks."""
    pipeline.chunk.zero_grad_buffer()
    pipeline.optimizer.zero_grad()
    generator = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    loss = pipeline.chunk(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()).mean()
    loss.backward()
    pipeline.chunk.finish_grad_sync()
    pipeline.optimizer.step()
    mean = loss.detach().float().clone()
    torch.distributed.all_reduce(mean)
    return float(mean) / torch.distributed.get_world_size()
