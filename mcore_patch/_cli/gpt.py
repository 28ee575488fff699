"""A GPT of any size under DDP and a distributed optimizer, the way each release of megatron-core builds it.

What the demo and the benchmarks run on. Importing this module imports megatron-core: the stand-ins of
``mcore_patch.testing`` have to be there before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module


@dataclass(frozen=True)
class Size:
    """How large a GPT is. It has ``layers * 12 * hidden**2 + 2 * vocabulary * hidden`` parameters, and a few more."""

    layers: int
    hidden: int
    vocabulary: int
    sequence: int = 32


def initialize_parallel() -> None:
    """All ranks of the process group are data-parallel ones."""
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def bare_model(size: Size, dtype: torch.dtype) -> Any:
    """A ``GPTModel``; its norms are fp32 until :func:`wrap` casts them."""
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # The fused kernel is for a GPU.
        masked_softmax_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=size.vocabulary,
        max_sequence_length=size.sequence,
    )


def wrap(model: Any) -> Any:
    """The model in ``Float16Module``, if it is bf16, and in DDP, as Megatron-LM does it."""
    inner = Float16Module(model.config, model) if model.config.bf16 else model
    return DistributedDataParallel(model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), inner)


def build_optimizer(wrapped: Any, learning_rate: float) -> Any:
    """Adam under a distributed optimizer; in some releases in a ChainedOptimizer of one."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=learning_rate,
        bf16=wrapped.config.bf16,
        params_dtype=wrapped.config.params_dtype,
        use_distributed_optimizer=True,
    )
    return get_megatron_optimizer(config, [wrapped])


def save(model: Any, folder: str) -> None:
    """Write a ``torch_dist`` checkpoint of the bare *model* into the empty *folder*."""
    dist_checkpointing.save(model.sharded_state_dict(), folder, get_default_save_sharded_strategy("torch_dist"))


def load(model: Any, folder: str) -> None:
    """Load a distributed checkpoint into the bare *model*, as Megatron-LM does it."""
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), folder))


def parameters_of(model: Any) -> dict[str, torch.nn.Parameter]:
    """The parameters of the bare *model* by name."""
    return dict(model.named_parameters())


def masters_of(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor, int]]:
    """(parameter, master, first element of the flat parameter that the master holds), for each master on this rank."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        groups = zip(part.model_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
        for parameters, masters in groups:
            for parameter, master in zip(parameters, masters, strict=True):
                yield parameter, master, part._get_model_param_range_map(parameter)["param"].start
