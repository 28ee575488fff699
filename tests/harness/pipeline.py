"""What one rank does: write a checkpoint; load one into a model and look at the masters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from mcore_patch.testing.adam import FusedAdam

from . import masters as measure
from .models import (
    Chunks,
    bare_chunks,
    build_optimizer,
    fill,
    initialize_parallel,
    parameters_of,
    seeded,
    train_step,
    unwrapped,
    wrap_ddp,
    wrap_float16,
)
from .scenario import Master, Mode, Scenario

Truth = dict[tuple[int, str], torch.Tensor]
"""(chunk, parameter name) -> the fp32 value of the whole parameter as this rank holds it."""


@dataclass
class Pipeline:
    """What a probe gets to see."""

    scenario: Scenario
    mode: Mode
    folder: Path
    chunks: Chunks
    optimizer: Any
    truth: Truth
    loaded: dict[str, Any]


def write(writer: Scenario, folder: Path) -> None:
    """Writes the seeded weights at ``writer.disk``; for resume also the state of an optimizer, with its own masters."""
    initialize_parallel(writer)
    chunks = wrap_float16(bare_chunks(writer, getattr(torch, writer.disk)))
    fill(writer, chunks)
    trained, optimizer = _trained(writer) if writer.then == "resume" else (chunks, None)
    if writer.fmt == "torch":
        state = _keyed(chunks, lambda chunk: chunk.state_dict())
        if optimizer is not None:
            state["optimizer"] = optimizer.state_dict()
            if writer.distributed:
                optimizer.save_parameter_state(str(_optimizer_file(folder)))
        if parallel_state.get_data_parallel_rank() == 0 or writer.ep > 1:
            torch.save(state, _rank_file(folder))
        return
    state = _keyed(chunks, _sharded_state)
    if optimizer is not None:
        state["optimizer"] = _optimizer_sharded_state(writer, trained, optimizer, is_loading=False)
    # By name: 0.6 has no other way.
    strategy: Any = (writer.fmt, 1)
    if writer.save == "parallel":
        strategy = fully_parallel_save(writer.fmt)
    dist_checkpointing.save(state, str(folder), strategy)


def _trained(writer: Scenario) -> tuple[Chunks, Any]:
    """A model and an optimizer with state, whose masters are the seeded ones: they are no weights of any checkpoint."""
    dtype = getattr(torch, writer.params)
    chunks = wrap_ddp(writer, wrap_float16(bare_chunks(writer, dtype), writer.mixed))
    optimizer = build_optimizer(writer, chunks, dtype)
    train_step(chunks, optimizer)
    expected = _seeded_masters(writer, chunks)
    named = {id(parameter): (chunk, name) for chunk, name, parameter in parameters_of(chunks)}
    with torch.no_grad():
        for parameter, master, start in measure.masters_of(optimizer):
            value = expected[named[id(parameter)]].reshape(-1)[start : start + master.numel()]
            master.copy_(value.reshape(master.shape))
        for part in measure.optimizers_of(optimizer):
            # What HybridDeviceOptimizer does at the end of each step.
            for shard, stepped in getattr(part.optimizer, "param_to_inner_param", {}).items():
                shard.copy_(stepped)
    return chunks, optimizer


def _seeded_masters(scenario: Scenario, chunks: Chunks) -> Truth:
    return {
        (chunk, name): seeded(scenario, chunk, name, parameter, "masters")
        for chunk, name, parameter in parameters_of(chunks)
    }


def _optimizer_sharded_state(scenario: Scenario, chunks: Chunks, optimizer: Any, is_loading: bool) -> Any:
    model_state = _keyed(chunks, _sharded_state)
    sharding: dict[str, Any] = {}
    if scenario.sharding is not None:
        # Other optimizers pass on what they do not know; metadata is known from 0.14 on.
        if "metadata" in inspect.signature(DistributedOptimizer.sharded_state_dict).parameters:
            sharding = {"metadata": {"distrib_optim_sharding_type": scenario.sharding}}
        else:
            sharding = {"sharding_type": scenario.sharding}
    return optimizer.sharded_state_dict(model_state, is_loading=is_loading, **sharding)


def run(
    scenario: Scenario, mode: Mode, folder: Path, probe: Callable[[Pipeline], Any] | None
) -> tuple[list[Master], dict[str, str], Any]:
    initialize_parallel(scenario)
    if scenario.optimizer.startswith("offload"):
        # Its param groups name the classes that it steps with, and torch unpickles known classes only since 2.6.
        torch.serialization.add_safe_globals([torch.optim.AdamW, FusedAdam])
    truth = read_truth(scenario, folder)
    if "patched" in mode:
        import mcore_patch

        mcore_patch.apply()
    pipeline = build_and_load(scenario, mode, folder, truth)
    masters = measure.masters_vs_truth(pipeline.optimizer, pipeline.chunks, pipeline.truth)
    return masters, measure.model_snapshot(pipeline.chunks), probe(pipeline) if probe else None


def read_truth(scenario: Scenario, folder: Path) -> Truth:
    """The checkpoint in this layout, by the release's own code: an fp32 model of it loses nothing.

    In the writer's layout it must be what the writer seeded.
    """
    plain = scenario.but(params="float32", load="plain", write="unwrapped", missing=0, then="nothing")
    chunks = bare_chunks(plain, torch.float32)
    load(plain, folder, chunks)
    truth = {(chunk, name): parameter.detach().clone() for chunk, name, parameter in parameters_of(chunks)}
    if scenario.saved_as is None:
        for chunk, name, parameter in parameters_of(chunks):
            written = seeded(scenario, chunk, name, parameter, "weights").to(getattr(torch, scenario.disk))
            assert torch.equal(truth[chunk, name], written.float()), f"the checkpoint is not what was written: {name}"
    return truth


def build_and_load(scenario: Scenario, mode: Mode, folder: Path, truth: Truth) -> Pipeline:
    dtype = getattr(torch, scenario.params)
    chunks = bare_chunks(scenario, dtype)
    fill(scenario, chunks, "initialization")
    loaded: dict[str, Any] = {}
    if scenario.order == "before-ddp":
        loaded = load(scenario, folder, chunks)
    chunks = wrap_ddp(scenario, wrap_float16(chunks, scenario.mixed))
    if scenario.order == "weights-first":
        loaded = load(scenario, folder, chunks)
    optimizer = build_optimizer(scenario, chunks, dtype)
    if scenario.order == "optimizer-first":
        loaded = load(scenario, folder, chunks, optimizer)
    if scenario.change:
        _change(chunks, truth)
    if scenario.missing:
        _expect_model_where_missing(chunks, loaded, truth)
    if scenario.then == "reload":
        optimizer.reload_model_params(**({"state_dict": loaded} if "native" in mode else {}))
    elif scenario.then == "optimizer-state-without-masters":
        optimizer.load_state_dict(optimizer.state_dict())
    elif scenario.then == "resume":
        optimizer.load_state_dict(loaded["optimizer"])
        if scenario.fmt == "torch" and scenario.distributed:
            optimizer.load_parameter_state(str(_optimizer_file(folder)))
        truth = _seeded_masters(scenario, chunks)
    return Pipeline(scenario, mode, folder, chunks, optimizer, truth, loaded)


def load(scenario: Scenario, folder: Path, chunks: Chunks, optimizer: Any = None) -> dict[str, Any]:
    """Loads the checkpoint into *chunks* as the scenario says; returns the state dict, keyed as Megatron-LM keys it."""
    state: dict[str, Any]
    if scenario.fmt == "torch":
        state = torch.load(_rank_file(folder), map_location="cpu", weights_only=False)
    else:
        template = _keyed(chunks, _sharded_state)
        if scenario.then == "resume":
            template["optimizer"] = _optimizer_sharded_state(scenario, chunks, optimizer, is_loading=True)
        # The two-stage strategy joins paths by `/` (since 0.13 `load` makes no Path of what it is given).
        where: Any = folder if scenario.load == "two-stage" else str(folder)
        state = dist_checkpointing.load(template, where, _strategy(scenario, folder))
    for key, chunk in zip(_keys(chunks), chunks, strict=True):
        named = [name for name, _ in unwrapped(chunk).named_parameters()]
        for name in named[: scenario.missing]:
            del state[key][name]
        if scenario.write != "in-place":
            target = chunk if scenario.write == "ddp" else unwrapped(chunk)
            target.load_state_dict(state[key], strict=not scenario.missing)
    return state


def _strategy(scenario: Scenario, folder: Path) -> Any:
    if scenario.load == "on-device":
        from megatron.core.dist_checkpointing.strategies.tensorstore import TensorStoreLoadShardedStrategy

        return TensorStoreLoadShardedStrategy(load_directly_on_device=True)
    if scenario.load == "two-stage":
        from megatron.core.dist_checkpointing.strategies.two_stage import TwoStageDataParallelLoadShardedStrategy

        return TwoStageDataParallelLoadShardedStrategy(parallel_state.get_data_parallel_group())
    return fully_parallel_load(folder) if scenario.load == "parallel" else None


def fully_parallel_save(fmt: str) -> Any:
    """A strategy that shares the writing of *fmt* between data-parallel ranks (0.7 and later)."""
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(fmt), group)


def fully_parallel_load(folder: Path) -> Any:
    """A strategy that shares the reading of the checkpoint between data-parallel ranks (0.7 and later)."""
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    # 0.7's default gathers tensors of uneven sizes, which gloo refuses; later the default is broadcast.
    default = inspect.signature(FullyParallelLoadStrategyWrapper.__init__).parameters["exchange_algo"].default
    options = {"exchange_algo": "gather_object"} if default == "gather_rounds" else {}
    return FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(folder)), group, **options)


def _change(chunks: Chunks, truth: Truth) -> None:
    """Adds 1 to every second parameter; the truth of those is the model from now on."""
    with torch.no_grad():
        for index, (chunk, name, parameter) in enumerate(parameters_of(chunks)):
            if index % 2:
                parameter.add_(1)
                truth[chunk, name] = parameter.detach().float().clone()


def _expect_model_where_missing(chunks: Chunks, loaded: dict[str, Any], truth: Truth) -> None:
    keys = _keys(chunks)
    for chunk, name, parameter in parameters_of(chunks):
        if name not in loaded[keys[chunk]]:
            truth[chunk, name] = parameter.detach().float().clone()


def _keys(chunks: Chunks) -> list[str]:
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def _keyed(chunks: Chunks, state_of: Callable[[torch.nn.Module], Any]) -> dict[str, Any]:
    state = {}
    for index, (key, chunk) in enumerate(zip(_keys(chunks), chunks, strict=True)):
        if len(chunks) > 1:
            # Up to 0.12 a chunk finds the offset of its layers by this rank.
            parallel_state.set_virtual_pipeline_model_parallel_rank(index)
        state[key] = state_of(unwrapped(chunk))
    return state


def _sharded_state(chunk: Any) -> Any:
    return chunk.sharded_state_dict()


def _rank_file(folder: Path) -> Path:
    tp = parallel_state.get_tensor_model_parallel_rank()
    pp = parallel_state.get_pipeline_model_parallel_rank()
    ep = parallel_state.get_expert_model_parallel_rank()
    return folder / f"mp_rank_{tp:02d}_{pp:03d}_{ep:03d}.pt"


def _optimizer_file(folder: Path) -> Path:
    file = _rank_file(folder)
    return file.with_name(f"optimizer_{file.name}")
