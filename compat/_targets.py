"""The target table: every attribute that may be patched, why, and when the patch can go."""

from __future__ import annotations

from ._schema import Checked, Target

_MEGATRON = "https://github.com/NVIDIA/Megatron-LM"
_CHECKPOINTING = "megatron.core.dist_checkpointing"
_CHECKPOINTING_DIR = _CHECKPOINTING.replace(".", "/")
_OPTIMIZER = "megatron.core.optimizer"
_OPTIMIZER_DIR = _OPTIMIZER.replace(".", "/")

_LOADS_AT_DISK_PRECISION = "dist_checkpointing.load returns float tensors at the dtype that they have on disk"
_MASTERS_FROM_CHECKPOINT = "upstream builds masters from the checkpoint's tensors by default, for every format"

_TABLE = (
    # torch: the same signatures in every release from 2.1 to 2.13.
    Target(
        id="module_load_state_dict",
        module="torch.nn.modules.module",
        qualname="Module.load_state_dict",
        why="It casts the checkpoint's tensors to the parameters' dtype, and its caller then drops them.",
        url="https://github.com/NVIDIA-NeMo/RL/pull/2633",
        until=_MASTERS_FROM_CHECKPOINT,
        after="torch",
        checked=Checked(signatures=("(self, state_dict, strict=, assign=)",)),
    ),
    Target(
        id="module_leaf_load",
        module="torch.nn.modules.module",
        qualname="Module._load_from_state_dict",
        why="Here, behind all renaming of keys, it is known which tensor is copied into which parameter.",
        url=f"{_MEGATRON}/pull/4324",
        until=_MASTERS_FROM_CHECKPOINT,
        after="torch",
        checked=Checked(
            signatures=(
                "(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)",
            )
        ),
    ),
    Target(
        id="module_apply",
        module="torch.nn.modules.module",
        qualname="Module._apply",
        why="A cast of subclass parameters swaps them, which torch refuses while a weak reference to one exists.",
        url="https://github.com/pytorch/pytorch/blob/v2.6.0/torch/utils/__init__.py#L40",
        until="torch swaps tensors that have weak references",
        after="torch",
        checked=Checked(signatures=("(self, fn, recurse=)",)),
    ),
    Target(
        id="dist_load",
        module=f"{_CHECKPOINTING}.serialization",
        qualname="load",
        why="Pipelines that drop its result load into the parameters in place, past load_state_dict.",
        url="https://github.com/verl-project/verl/blob/main/verl/utils/model.py",
        until=_MASTERS_FROM_CHECKPOINT,
    ),
    Target(
        id="torch_dist_load",
        module=f"{_CHECKPOINTING}.strategies.torch",
        qualname="TorchDistLoadShardedStrategy.load",
        why="It reads into the model's own tensors, which cuts an fp32 checkpoint to bf16.",
        url=f"{_MEGATRON}/blob/core_v0.16.1/{_CHECKPOINTING_DIR}/strategies/torch.py#L292",
        until=_LOADS_AT_DISK_PRECISION,
    ),
    Target(
        id="fully_parallel_load",
        module=f"{_CHECKPOINTING}.strategies.fully_parallel",
        qualname="FullyParallelLoadStrategyWrapper.load",
        why="Ranks exchange what they read at the model's dtype: every rank must ask for that on disk.",
        url=f"{_MEGATRON}/blob/core_v0.16.1/{_CHECKPOINTING_DIR}/exchange_utils.py#L98",
        until=_LOADS_AT_DISK_PRECISION,
    ),
    Target(
        id="tensorstore_load",
        module=f"{_CHECKPOINTING}.strategies.tensorstore",
        qualname="TensorStoreLoadShardedStrategy.load",
        why="With load_directly_on_device it copies a zarr checkpoint into the model's own tensors.",
        url=f"{_MEGATRON}/blob/core_v0.15.3/{_CHECKPOINTING_DIR}/strategies/tensorstore.py#L105",
        until="the lines up to 0.15 are no longer covered: 0.16 removed the zarr format",
    ),
    Target(
        id="two_stage_load",
        module=f"{_CHECKPOINTING}.strategies.two_stage",
        qualname="TwoStageDataParallelLoadShardedStrategy.load",
        why="It copies a zarr checkpoint into the model's own tensors, and broadcasts those.",
        url=f"{_MEGATRON}/blob/core_v0.15.3/{_CHECKPOINTING_DIR}/strategies/two_stage.py#L258",
        until="the lines up to 0.15 are no longer covered: 0.16 removed the zarr format",
    ),
    Target(
        id="distributed_optimizer_init",
        module=f"{_OPTIMIZER}.distrib_optimizer",
        qualname="DistributedOptimizer.__init__",
        why="Built after a load, it takes masters from cast or quantized parameters, or from the random "
        "values that these were initialised with.",
        url=f"{_MEGATRON}/blob/core_v0.19.0/{_OPTIMIZER_DIR}/distrib_optimizer.py#L431",
        until=_MASTERS_FROM_CHECKPOINT,
    ),
    Target(
        id="distributed_optimizer_copy",
        module=f"{_OPTIMIZER}.distrib_optimizer",
        qualname="DistributedOptimizer._copy_model_params_to_main_params",
        why="It refreshes masters from the parameters, or from a state dict that was cast or quantized.",
        url=f"{_MEGATRON}/pull/7405",
        until=_MASTERS_FROM_CHECKPOINT,
        accepts_also=("state_dict",),
    ),
    Target(
        id="distributed_optimizer_load",
        module=f"{_OPTIMIZER}.distrib_optimizer",
        qualname="DistributedOptimizer.load_state_dict",
        why="Without parameter state it leaves stale masters; with it, it brings masters that must win.",
        url="https://github.com/NovaSky-AI/SkyRL/pull/2149",
        until=_MASTERS_FROM_CHECKPOINT,
    ),
    Target(
        id="distributed_optimizer_load_dp_zero",
        module=f"{_OPTIMIZER}.distrib_optimizer",
        qualname="DistributedOptimizer.load_parameter_state_from_dp_zero",
        why="It restores masters from optimizer state, which must win over the checkpoint's weights.",
        url=f"{_MEGATRON}/blob/core_v0.16.1/{_OPTIMIZER_DIR}/distrib_optimizer.py#L1965",
        until=_MASTERS_FROM_CHECKPOINT,
    ),
    Target(
        id="float16_optimizer_init",
        module=f"{_OPTIMIZER}.optimizer",
        qualname="Float16OptimizerWithFloat16Params.__init__",
        why="Built after a load, it takes masters from cast parameters.",
        url=f"{_MEGATRON}/blob/core_v0.19.0/{_OPTIMIZER_DIR}/optimizer.py#L1012",
        until=_MASTERS_FROM_CHECKPOINT,
    ),
    Target(
        id="float16_optimizer_copy",
        module=f"{_OPTIMIZER}.optimizer",
        qualname="Float16OptimizerWithFloat16Params._copy_model_params_to_main_params",
        why="It refreshes masters from cast parameters; a state dict it refuses with an AssertionError.",
        url=f"{_MEGATRON}/blob/core_v0.19.0/{_OPTIMIZER_DIR}/optimizer.py#L1119",
        until=_MASTERS_FROM_CHECKPOINT,
        accepts_also=("state_dict",),
    ),
    Target(
        id="float16_optimizer_load",
        module=f"{_OPTIMIZER}.optimizer",
        qualname="Float16OptimizerWithFloat16Params.load_state_dict",
        why="It restores the masters from optimizer state, which wins over the checkpoint's weights.",
        url=f"{_MEGATRON}/blob/core_v0.19.0/{_OPTIMIZER_DIR}/optimizer.py#L1191",
        until=_MASTERS_FROM_CHECKPOINT,
    ),
    Target(
        id="layer_wise_init",
        module=f"{_OPTIMIZER}.layer_wise_optimizer",
        qualname="LayerWiseDistributedOptimizer.__init__",
        why="Built after a load, it leaves to other ranks what is then remembered here for nothing.",
        url=f"{_MEGATRON}/blob/core_v0.16.1/{_OPTIMIZER_DIR}/layer_wise_optimizer.py#L42",
        until=_MASTERS_FROM_CHECKPOINT,
        needed=False,
    ),
    Target(
        id="layer_wise_load",
        module=f"{_OPTIMIZER}.layer_wise_optimizer",
        qualname="LayerWiseDistributedOptimizer.load_state_dict",
        why="Masters that it restores on other ranks are not waited for here.",
        url=f"{_MEGATRON}/blob/core_v0.16.1/{_OPTIMIZER_DIR}/layer_wise_optimizer.py#L235",
        until=_MASTERS_FROM_CHECKPOINT,
        needed=False,
    ),
    Target(
        id="mixed_precision_reload",
        module=f"{_OPTIMIZER}.optimizer",
        qualname="MixedPrecisionOptimizer.reload_model_params",
        why="It takes no state dict before 0.14, and matches names by substring up to 0.16.",
        url=f"{_MEGATRON}/pull/3569",
        until=_MASTERS_FROM_CHECKPOINT,
        accepts_also=("state_dict",),
    ),
    Target(
        id="fp32_reload",
        module=f"{_OPTIMIZER}.optimizer",
        qualname="FP32Optimizer.reload_model_params",
        why="In a chain it is handed the same state dict as its neighbours, and takes none before 0.14.",
        url=f"{_MEGATRON}/pull/3569",
        until="the lines up to 0.13 are no longer covered",
        accepts_also=("state_dict",),
    ),
    Target(
        id="chained_reload",
        module=f"{_OPTIMIZER}.optimizer",
        qualname="ChainedOptimizer.reload_model_params",
        why="From 0.14 to 0.17 it hands the state dict to the first optimizer only: expert masters miss out.",
        url=f"{_MEGATRON}/pull/3676",
        until="the lines up to 0.17 are no longer covered",
        accepts_also=("state_dict",),
    ),
)

TARGETS: dict[str, Target] = {target.id: target for target in _TABLE}
"""All targets by id, in the order in which data flows."""
