"""Small GPTs in any layout, with every parameter random and known."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from .scenario import Scenario

# Every parameter is a multiple of 128 elements: 0.10 has a bucket bug with tied embeddings otherwise.
HIDDEN = 128
FFN = 128
HEADS = 4
VOCABULARY = 128
SEQUENCE = 32

Chunks = list[torch.nn.Module]


def accepted(function: Callable[..., Any], **kwargs: Any) -> dict[str, Any]:
    """Those of *kwargs* that *function* takes in this release."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in parameters}


def initialize_parallel(scenario: Scenario) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=scenario.tp,
        pipeline_model_parallel_size=scenario.pp,
        virtual_pipeline_model_parallel_size=scenario.vpp if scenario.vpp > 1 else None,
        expert_model_parallel_size=scenario.ep,
        **({"num_distributed_optimizer_instances": scenario.instances} if scenario.instances > 1 else {}),
    )
    model_parallel_cuda_manual_seed(1)


def transformer_config(scenario: Scenario, dtype: torch.dtype) -> TransformerConfig:
    config = TransformerConfig(
        num_layers=scenario.layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_moe_experts=scenario.experts,
        tensor_model_parallel_size=scenario.tp,
        pipeline_model_parallel_size=scenario.pp,
        virtual_pipeline_model_parallel_size=scenario.vpp if scenario.vpp > 1 else None,
        expert_model_parallel_size=scenario.ep,
        # An assertion of MoE with TP; it changes no parameter.
        sequence_parallel=scenario.experts is not None and scenario.tp > 1,
        # MoE layers refuse biases from 0.14 on.
        add_bias_linear=scenario.experts is None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
    )
    # torch's norm, which stands in for the fused ones, has no sequence parallelism.
    config.sequence_parallel = False
    return config


def bare_chunks(scenario: Scenario, dtype: torch.dtype) -> Chunks:
    """This rank's model chunks as ``GPTModel`` builds them: norms are fp32, the rest is *dtype*."""
    config = transformer_config(scenario, dtype)
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    chunks: Chunks = []
    for stage in range(scenario.vpp):
        if scenario.vpp > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
        chunks.append(
            GPTModel(
                config=config,
                transformer_layer_spec=get_gpt_layer_local_spec(num_experts=scenario.experts),
                vocab_size=VOCABULARY,
                max_sequence_length=SEQUENCE,
                pre_process=pp_rank == 0 and stage == 0,
                post_process=pp_rank == scenario.pp - 1 and stage == scenario.vpp - 1,
                share_embeddings_and_output_weights=scenario.tied,
                **accepted(GPTModel.__init__, vp_stage=stage if scenario.vpp > 1 else None),
            )
        )
    return chunks


def wrap_float16(chunks: Chunks, mixed: bool = False) -> Chunks:
    """The chunks in ``Float16Module``, as Megatron-LM does, if they are 16-bit; it casts their norms unless *mixed*."""
    config = chunks[0].config
    if not (config.bf16 or config.fp16):
        return chunks
    norms = [each for chunk in chunks for name, each in chunk.named_parameters() if mixed and "norm" in name]
    wrapped: Chunks = [Float16Module(config, chunk) for chunk in chunks]
    for norm in norms:
        norm.data = norm.data.float()
    return wrapped


def wrap_ddp(scenario: Scenario, chunks: Chunks) -> Chunks:
    distributed = scenario.distributed
    kwargs: dict[str, Any]
    if "ddp_config" in inspect.signature(DistributedDataParallel.__init__).parameters:
        from megatron.core.distributed import DistributedDataParallelConfig

        instances = {"num_distributed_optimizer_instances": scenario.instances} if scenario.instances > 1 else {}
        kwargs = {"ddp_config": DistributedDataParallelConfig(use_distributed_optimizer=distributed, **instances)}
    else:  # 0.6
        kwargs = {
            "use_distributed_optimizer": distributed,
            "accumulate_allreduce_grads_in_fp32": False,
            "overlap_grad_reduce": False,
        }
    if "data_parallel_group" in inspect.signature(DistributedDataParallel.__init__).parameters:  # 0.6, 0.7
        kwargs["data_parallel_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
        kwargs["expert_data_parallel_group"] = parallel_state.get_data_modulo_expert_parallel_group()
    layouts = _layouts(chunks, kwargs["ddp_config"]) if scenario.optimizer == "muon-layout" else [{}] * len(chunks)
    return [
        DistributedDataParallel(chunk.config, module=chunk, disable_bucketing=index > 0, **kwargs, **layout)
        for index, (chunk, layout) in enumerate(zip(chunks, layouts, strict=True))
    ]


def _layouts(chunks: Chunks, ddp_config: Any) -> list[dict[str, Any]]:
    """Buffers of their own for what the layer-wise optimizer steps, as Megatron-LM's training makes them (0.18+)."""
    from megatron.core.optimizer import layer_wise_optimizer as layer_wise

    layer_wise.tag_params_for_buffer_routing(chunks)
    size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    compute = layer_wise.LayerWiseDistributedOptimizer.compute_full_param_layout
    trained = [[each for each in chunk.parameters() if each.requires_grad] for chunk in chunks]
    return [{"full_param_layout": compute(parameters, None, size, ddp_config)} for parameters in trained]


def build_optimizer(scenario: Scenario, chunks: Chunks, dtype: torch.dtype) -> Any:
    offload = scenario.optimizer.startswith("offload")
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        use_distributed_optimizer=scenario.distributed and not scenario.optimizer.startswith("muon"),
        **({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0} if offload else {}),
        **({"use_precision_aware_optimizer": True} if scenario.optimizer == "offload-precision-aware" else {}),
    )
    optimizer: Any
    if scenario.optimizer == "layer-wise":
        optimizer = _layer_wise(config, chunks)
    elif scenario.optimizer.startswith("muon"):
        optimizer = _muon(config, chunks, layer_wise=scenario.optimizer != "muon")
    else:
        optimizer = get_megatron_optimizer(config, chunks)
    if hasattr(optimizer, "allgather_params"):
        # gloo gathers no tensors of uneven sizes; upstream keeps the other one for reference.
        optimizer.allgather_params = optimizer.broadcast_params
    return optimizer


def _muon(config: OptimizerConfig, chunks: Chunks, layer_wise: bool) -> Any:
    from megatron.core.optimizer.muon import get_megatron_muon_optimizer

    if not hasattr(config, "use_layer_wise_distributed_optimizer"):  # 0.16, 0.17
        return get_megatron_muon_optimizer(config, chunks, layer_wise_distributed_optimizer=layer_wise)
    return get_megatron_optimizer(
        replace(config, optimizer="muon", use_layer_wise_distributed_optimizer=layer_wise), chunks
    )


def _layer_wise(config: OptimizerConfig, chunks: Chunks) -> Any:
    """As Muon's factory builds it, with Adam for all parameters: Muon itself needs another package."""
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    chained = get_megatron_optimizer(replace(config, bf16=False), chunks).chained_optimizers
    return LayerWiseDistributedOptimizer(
        [child.optimizer for child in chained],
        config,
        ProcessGroupCollection.use_mpu_process_groups(),
        [child.init_state_fn for child in chained],
        **accepted(LayerWiseDistributedOptimizer.__init__, model_chunks=chunks),
    )


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    while isinstance(module, DistributedDataParallel | Float16Module):
        module = module.module
    return module


def parameters_of(chunks: Chunks) -> Iterator[tuple[int, str, torch.nn.Parameter]]:
    """(chunk, name in the unwrapped chunk's state dict, parameter) of every parameter on this rank."""
    for index, chunk in enumerate(chunks):
        for name, parameter in unwrapped(chunk).named_parameters():
            yield index, name, parameter


def seeded(scenario: Scenario, chunk: int, name: str, parameter: torch.Tensor, what: str) -> torch.Tensor:
    """The fp32 value of a parameter (or, with another *what*, of something of its shape) in this layout on this rank.

    Ranks that hold the same parameter get the same value; no value is exact in 16 bits, but for a few.
    """
    place: list[Any] = [what, name, parallel_state.get_pipeline_model_parallel_rank(), chunk]
    if getattr(parameter, "shared_embedding", False) or (scenario.tied and name.endswith("word_embeddings.weight")):
        place = [what, "tied"]
    if getattr(parameter, "tensor_model_parallel", False):
        place.append(("tp", parallel_state.get_tensor_model_parallel_rank()))
    if ".experts." in name:
        place.append(("ep", parallel_state.get_expert_model_parallel_rank()))
    seed = int.from_bytes(hashlib.sha256(repr(place).encode()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * 0.05


def train_step(chunks: Chunks, optimizer: Any) -> None:
    """One step of *optimizer* on seeded gradients."""
    for _, name, parameter in parameters_of(chunks):
        generator = torch.Generator().manual_seed(len(name))
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step()


def fill(scenario: Scenario, chunks: Chunks, what: str = "weights") -> None:
    """Sets every parameter to its seeded value, cut to its dtype."""
    with torch.no_grad():
        for chunk, name, parameter in parameters_of(chunks):
            parameter.copy_(seeded(scenario, chunk, name, parameter, what))
