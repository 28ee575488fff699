"""Megatron-FSDP (custom FSDP up to 0.13) on a CPU, with gloo: its buffers of masters after a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from . import pipeline as p
from .models import (
    Chunks,
    accepted,
    bare_chunks,
    build_optimizer,
    fill,
    initialize_parallel,
    parameters_of,
    wrap_float16,
)
from .scenario import Scenario


def under_fsdp(scenario: Scenario, folder: Path, patched: bool, way: str, strategy: str = "optim") -> dict[str, Any]:
    """Weights come before FSDP wraps the model, or after that, into it; a reload follows where that is the *way*.

    ``differing`` of ``numel`` elements of this rank's masters are not the checkpoint's. ``reload``: the exception of
    ``reload_model_params``, "none" for none. Patched, also what the report says and how many tensors stay remembered.
    """
    initialize_parallel(scenario)
    truth = p.read_truth(scenario, folder)
    if patched:
        import mcore_patch

        mcore_patch.apply(strict=True)
    chunks = bare_chunks(scenario, getattr(torch, scenario.params))
    fill(scenario, chunks, "initialization")
    if way == "weights-first":
        p.load(scenario, folder, chunks)
    names = {id(parameter): (chunk, name) for chunk, name, parameter in parameters_of(chunks)}
    [wrapped] = chunks = _wrap(wrap_float16(chunks), strategy)
    optimizer = build_optimizer(scenario, chunks, getattr(torch, scenario.params))
    answer: dict[str, Any] = {"differing": 0, "numel": 0, "reload": "none"}
    if way == "reload":
        wrapped.load_state_dict(torch.load(p._rank_file(folder), weights_only=False)["model"], strict=False)
    elif way == "fsdp_dtensor":
        _load_dtensors(wrapped, {name: value for (_, name), value in truth.items()}, folder / f"dcp-{patched}")
    if way != "weights-first":
        try:
            optimizer.reload_model_params()
        except NotImplementedError:
            answer["reload"] = "NotImplementedError"
    for group in wrapped.param_and_grad_buffer.parameter_groups:
        buffer = group.main_weight_buffer
        for index, parameter in enumerate(group.params):
            start, stop = buffer.locate_item_in_global_item(index)
            master = buffer.get_item(index, only_shard=buffer.is_data_distributed)
            exact = truth[names[id(parameter)]].reshape(-1)[start:stop]
            answer["differing"] += int((master.view(torch.int32) != exact.view(torch.int32)).sum())
            answer["numel"] += master.numel()
    if patched:
        import mcore_patch
        from mcore_patch._stations.remember import memory

        answer["said"] = {(record.held_by, record.source, record.reason) for record in mcore_patch.report()}
        answer["remembered"] = len(memory)
    return answer


def _wrap(chunks: Chunks, strategy: str) -> Chunks:
    # A device's index is all that it asks of a GPU; and 0.14 looks into a table that torch has no longer.
    torch.cuda.current_device = lambda: 0
    torch.distributed.device_mesh._mesh_resources.child_to_root_mapping = {}
    try:
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    except ImportError:
        from megatron.core.distributed.custom_fsdp import FullyShardedDataParallel
    shares_parameters = strategy == "optim_grads_params"
    from megatron.core.distributed import DistributedDataParallelConfig  # 0.6 has none

    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=strategy,
        overlap_grad_reduce=shares_parameters,
        overlap_param_gather=shares_parameters,
        **accepted(DistributedDataParallelConfig.__init__, use_megatron_fsdp=True, use_custom_fsdp=True),
    )
    device = torch.device("cpu")
    return [FullyShardedDataParallel(chunk.config, config, chunk, device=device) for chunk in chunks]


def _load_dtensors(wrapped: Any, weights: dict[str, torch.Tensor], folder: Path) -> None:
    """As Megatron-LM loads its format ``fsdp_dtensor``: the state dict of the wrapped model is the masters."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )

    torch.distributed.checkpoint.save(dict(weights), checkpoint_id=folder)
    targets = {key: value for key, value in wrapped.state_dict().items() if isinstance(value, torch.Tensor)}
    loaded = {key.replace("module.", ""): value for key, value in targets.items()}
    preprocess_state_dict_for_uneven_dtensor(loaded)
    torch.distributed.checkpoint.load(loaded, checkpoint_id=folder)
    wrapped.load_state_dict(targets, strict=False)
