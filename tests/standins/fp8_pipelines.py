"""Pipelines that bring a checkpoint into an fp8 model, stock or patched: what a test compares, as plain data."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from . import fp8_model as f

# Where the quantized classes of all TE releases keep their bytes and scales.
_PARTS = ("_data", "_scale_inv", "_transpose", "_rowwise_data", "_columnwise_data")
_PARTS += ("_rowwise_scale_inv", "_columnwise_scale_inv")


@dataclass(frozen=True)
class Outcome:
    """What one rank saw; ``differing`` is summed over the ranks."""

    differing: int
    total: int
    model: dict[str, str]
    sources: Counter[str] = field(default_factory=Counter)
    losses: tuple[float, ...] = ()
    extra: Any = None
    work: Counter[str] = field(default_factory=Counter)
    """Collectives by name, and casts to fp8 (``quantized``), from where the model is built to the end of the case."""


State = dict[str, torch.Tensor]


def run(case: str, patched: bool, folder: Path, options: dict[str, Any]) -> Outcome:
    """One case on this rank. ``options``: those of :class:`fp8_model.Options`, ``disk`` (a dtype's name), ``steps``."""
    warnings.simplefilter("ignore")
    disk = getattr(torch, options.pop("disk", "bfloat16"))
    steps = options.pop("steps", 0)
    if "main_params_dtype" in options:
        options["main_params_dtype"] = getattr(torch, options["main_params_dtype"])
    chosen = f.Options(**options)
    f.initialize(chosen)
    if patched:
        import mcore_patch

        mcore_patch.apply(strict=True)
    with _counting():
        pipeline, state, extra = CASES[case](chosen, disk, folder)
    work = Counter(_work)
    count = f.differing(pipeline, lambda name, _: state[name])
    model = snapshot(pipeline.model)
    losses = tuple(f.train_step(pipeline) for _ in range(steps))
    return Outcome(count.differing, count.total, model, _sources(patched), losses, extra, work)


_work: Counter[str] = Counter()
_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast", "barrier")
_COLLECTIVES += ("broadcast_object_list", "gather_object", "reduce_scatter_tensor", "scatter_object_list")


@contextlib.contextmanager
def _counting() -> Iterator[None]:
    """Counts into ``_work`` what runs through ``torch.distributed`` and through the stand-in's cast to fp8."""
    stand_in = sys.modules["transformer_engine_torch"]
    places = [(torch.distributed, name, name) for name in _COLLECTIVES] + [(stand_in, "_to_bytes", "quantized")]
    originals = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, what), original in zip(places, originals, strict=True):
        setattr(owner, name, _counted(original, what))
    try:
        yield
    finally:
        for (owner, name, _), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def _counted(original: Callable[..., Any], what: str) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        _work[what] += 1
        return original(*args, **kwargs)

    return call


def _sources(patched: bool) -> Counter[str]:
    if not patched:
        return Counter()
    import mcore_patch

    return Counter(record.source for record in mcore_patch.report())


def snapshot(model: torch.nn.Module) -> dict[str, str]:
    """A digest of every parameter (quantized bytes, scales, transposes, amax) and of every amax history."""
    digests = {}
    for name, parameter in model.named_parameters():
        tensors = [parameter.detach()] if not f.is_fp8(parameter) else _parts(parameter)
        digests[name] = _digest(tensors)
    for name, module in model.named_modules():
        meta = getattr(module, "fp8_meta", None) or {}
        history = getattr(meta.get("scaling_fwd"), "amax_history", None)
        if history is not None:
            digests[f"{name}.amax_history"] = _digest([history])
    return digests


def _parts(parameter: Any) -> list[torch.Tensor]:
    quantizer = getattr(parameter, "_quantizer", None)
    found = [getattr(parameter, name, None) for name in _PARTS]
    found += [getattr(quantizer, name, None) for name in ("amax", "scale")]
    return [part for part in found if isinstance(part, torch.Tensor)]


def _digest(tensors: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------------ the cases


def reload(options: f.Options, disk: torch.dtype, _folder: Path) -> tuple[f.Pipeline, State, Any]:
    """The optimizer, ``load_state_dict``, ``reload_model_params()``."""
    pipeline = f.build(options)
    state = f.reference(pipeline.model, disk)
    f.load(pipeline.model, state)
    pipeline.optimizer.reload_model_params()
    return pipeline, state, None


def reload_with_state_dict(options: f.Options, disk: torch.dtype, _folder: Path) -> tuple[f.Pipeline, State, Any]:
    """The same with ``reload_model_params(state_dict=...)``."""
    pipeline = f.build(options)
    state = f.reference(pipeline.model, disk)
    f.load(pipeline.model, state)
    pipeline.optimizer.reload_model_params(state_dict={"model": dict(state)})
    return pipeline, state, None


def reload_twice(options: f.Options, disk: torch.dtype, folder: Path) -> tuple[f.Pipeline, State, Any]:
    """A second reload without a load in between."""
    pipeline, state, _ = reload(options, disk, folder)
    pipeline.optimizer.reload_model_params()
    return pipeline, state, None


def weights_first(options: f.Options, disk: torch.dtype, _folder: Path) -> tuple[f.Pipeline, State, Any]:
    """Weights before the optimizer is built, and no reload."""
    model = f.build_model(options)
    state = f.reference(model, disk)
    f.load(model, state)
    chunk = f.wrap(options, model)
    return f.Pipeline(options, chunk, f.build_optimizer(options, chunk)), state, None


def two_optimizers(options: f.Options, disk: torch.dtype, folder: Path) -> tuple[f.Pipeline, State, Any]:
    """A second optimizer over the same model. ``extra``: what megatron-core raises, if it does."""
    pipeline, state, _ = weights_first(options, disk, folder)
    try:
        return replace(pipeline, optimizer=f.build_optimizer(options, pipeline.chunk)), state, None
    except AttributeError as error:
        return pipeline, state, str(error)


def masters_by_hand(options: f.Options, disk: torch.dtype, folder: Path) -> tuple[f.Pipeline, State, Any]:
    """What a run without the defect starts from."""
    pipeline, state, _ = reload(options, disk, folder)
    f.set_masters(pipeline, state)
    return pipeline, state, None


def distributed(options: f.Options, disk: torch.dtype, folder: Path) -> tuple[f.Pipeline, State, Any]:
    """A ``torch_dist`` checkpoint of a plain model, as Megatron-LM loads it."""
    pipeline, state, checkpoint = _with_checkpoint(options, disk, folder)
    f.load_distributed(pipeline.model, checkpoint)
    pipeline.optimizer.reload_model_params()
    return pipeline, state, None


def distributed_with_state_dict(options: f.Options, disk: torch.dtype, folder: Path) -> tuple[f.Pipeline, State, Any]:
    """The same with ``reload_model_params(state_dict=<what was loaded>)``."""
    pipeline, state, checkpoint = _with_checkpoint(options, disk, folder)
    loaded = f.load_distributed(pipeline.model, checkpoint)
    pipeline.optimizer.reload_model_params(state_dict=loaded)
    return pipeline, state, None


def fully_parallel(options: f.Options, disk: torch.dtype, folder: Path) -> tuple[f.Pipeline, State, Any]:
    """The ``torch_dist`` checkpoint, each tensor read by one data-parallel rank, which gives it to the others."""
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper

    pipeline, state, checkpoint = _with_checkpoint(options, disk, folder)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(str(checkpoint)), group)
    f.load_distributed(pipeline.model, checkpoint, strategy)
    pipeline.optimizer.reload_model_params()
    return pipeline, state, None


def dequantized_before(options: f.Options, disk: torch.dtype, folder: Path) -> tuple[f.Pipeline, State, Any]:
    """The ``torch_dist`` checkpoint without quantizing it again while it loads (an option since 0.19)."""
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    pipeline, state, checkpoint = _with_checkpoint(options, disk, folder)
    f.load_distributed(pipeline.model, checkpoint, TorchDistLoadShardedStrategy(stream_ckpt_dequant=False))
    pipeline.optimizer.reload_model_params()
    return pipeline, state, None


def in_place(options: f.Options, disk: torch.dtype, folder: Path) -> tuple[f.Pipeline, State, Any]:
    """A distributed load whose result is dropped. ``extra``: whether the fp8 parameters got the checkpoint's values."""
    pipeline, state, checkpoint = _with_checkpoint(options, disk, folder)
    dist_checkpointing.load({"model": pipeline.model.sharded_state_dict()}, str(checkpoint))
    pipeline.optimizer.reload_model_params()
    first = next((name, q) for name, q in pipeline.model.named_parameters() if f.is_fp8(q))
    near = (f.dequantized(first[1]) - state[first[0]].float()).abs().max().item() < 0.1
    return pipeline, state, near


def edited(options: f.Options, disk: torch.dtype, folder: Path) -> tuple[f.Pipeline, State, Any]:
    """Every second parameter is changed after the load; those masters shall be the model's."""
    pipeline = f.build(options)
    state = f.reference(pipeline.model, disk)
    f.load(pipeline.model, state)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(pipeline.model.named_parameters()):
            if index % 2:
                parameter.copy_((state[name].float() * 1.01).to(options.dtype))
                state[name] = f.dequantized(parameter)
    pipeline.optimizer.reload_model_params()
    return pipeline, state, None


def judged(options: f.Options, disk: torch.dtype, _folder: Path) -> tuple[f.Pipeline, State, Any]:
    """``extra``: how many fp8 parameters the loaded state dict and others are taken to explain, and of how many."""
    from mcore_patch._stations.parameters import explains

    pipeline = f.build(options)
    state = f.reference(pipeline.model, disk)
    largest = max(state, key=lambda name: state[name].numel() if "linear" in name else 0)
    state[largest].view(-1)[::97] *= 20000  # beyond what a stale delayed scale can hold
    f.load(pipeline.model, state)
    quantized = {name: q for name, q in pipeline.model.named_parameters() if f.is_fp8(q)}

    def explained(change: Any) -> int:
        return sum(explains(q, change(state[name]).reshape(-1)) for name, q in quantized.items())

    generator = torch.Generator().manual_seed(3)
    answers = {
        "the checkpoint": explained(lambda tensor: tensor),
        "another tensor": explained(lambda tensor: torch.randn(tensor.shape, generator=generator) * 0.05),
        "rows permuted": explained(lambda tensor: tensor.roll(1, 0)),
        "columns permuted": explained(lambda tensor: tensor.roll(1, 1)),
        "one element negated": explained(lambda tensor: _with_one_element(tensor, -1)),
        "one element up 15 %": explained(lambda tensor: _with_one_element(tensor, 1.15)),
        "scaled by 1 %": explained(lambda tensor: tensor.float() * 1.01),
        "negated": explained(lambda tensor: -tensor),
    }
    pipeline.optimizer.reload_model_params()
    return pipeline, state, (answers, len(quantized))


def _with_one_element(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """The largest that no delayed scale has to cut off is changed."""
    changed = tensor.float().clone()
    changed.view(-1)[torch.where(changed.abs() < 400, changed.abs(), 0).argmax()] *= factor
    return changed


def _with_checkpoint(options: f.Options, disk: torch.dtype, folder: Path) -> tuple[f.Pipeline, State, Path]:
    plain = f.build_model(replace(options, recipe=None, dtype=disk))
    state = f.reference(plain, disk)
    f.load(plain, state)
    checkpoint = folder / f"{disk}-{options.experts}-{torch.distributed.get_world_size()}"
    checkpoint.mkdir(exist_ok=True)
    torch.distributed.barrier()
    if not (checkpoint / ".metadata").exists():
        f.save_distributed(plain, checkpoint)
    torch.distributed.barrier()
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(5)
    _work.clear()
    return f.build(options), state, checkpoint


CASES = {
    case.__name__: case
    for case in (
        reload,
        reload_with_state_dict,
        reload_twice,
        weights_first,
        two_optimizers,
        masters_by_hand,
        distributed,
        distributed_with_state_dict,
        fully_parallel,
        dequantized_before,
        in_place,
        edited,
        judged,
    )
}
