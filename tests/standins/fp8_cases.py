"""What a pair of megatron-core and Transformer Engine does by itself to the masters of fp8 parameters, case by case.

Each case runs in a rank after ``initialize``, and answers with a line. Import it as ``fp8_model``.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from standins.fp8_model import (
    Options,
    Pipeline,
    build,
    build_model,
    build_optimizer,
    dequantized,
    differing,
    initialize,
    is_fp8,
    load,
    load_distributed,
    reference,
    save_distributed,
    set_masters,
    train_step,
    wrap,
)


def case_b(options: Options, disk: torch.dtype) -> str:
    """A state dict, then ``reload_model_params()``: the masters are what the fp8 parameters say, not the checkpoint."""
    pipeline = build(options)
    state = reference(pipeline.model, disk)
    load(pipeline.model, state)
    pipeline.optimizer.reload_model_params()
    from_checkpoint = differing(pipeline, lambda name, _: state[name])
    from_fp32 = differing(pipeline, lambda _, parameter: dequantized(parameter), is_fp8)
    from_nominal = differing(pipeline, lambda _, parameter: dequantized(parameter, options.dtype), is_fp8)
    return f"differ from checkpoint {from_checkpoint}; fp8: from dequantized {from_fp32}, from its bf16 {from_nominal}"


def case_c(options: Options, disk: torch.dtype) -> str:
    """The same with ``state_dict=``, where the release has it."""
    pipeline = build(options)
    if not _takes_state_dict(pipeline):
        return "no such argument"
    state = reference(pipeline.model, disk)
    load(pipeline.model, state)
    pipeline.optimizer.reload_model_params(state_dict={"model": dict(state)})
    return f"differ from checkpoint {differing(pipeline, lambda name, _: state[name])}"


def _takes_state_dict(pipeline: Pipeline) -> bool:
    return "state_dict" in inspect.signature(pipeline.optimizer.reload_model_params).parameters


def case_e(options: Options, disk: torch.dtype) -> str:
    """Weights first, optimizer second: the masters are the random initial values."""
    model = build_model(options)
    initial = {name: _initial_value(parameter) for name, parameter in model.named_parameters()}
    state = reference(model, disk)
    load(model, state)
    chunk = wrap(options, model)
    pipeline = Pipeline(options, chunk, build_optimizer(options, chunk))
    from_checkpoint = differing(pipeline, lambda name, _: state[name], is_fp8)
    from_fp8 = differing(pipeline, lambda _, parameter: dequantized(parameter), is_fp8)
    from_initial = differing(pipeline, lambda name, _: initial[name], is_fp8)
    return f"fp8: differ from checkpoint {from_checkpoint}, from dequantized {from_fp8}, from initial {from_initial}"


def _initial_value(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What Transformer Engine (2.2 and later) keeps of a parameter's initial value; else what the parameter is now."""
    kept = getattr(parameter, "get_high_precision_init_val", None)
    return (kept() if kept is not None else dequantized(parameter)).clone()


def case_t(options: Options, disk: torch.dtype) -> str:
    """A ``torch_dist`` checkpoint of a plain model, then both ways to reload."""
    plain = build_model(replace(options, recipe=None, dtype=disk))
    state = reference(plain, disk)
    load(plain, state)
    pipeline = build(options)
    folders: list[Any] = [None]
    if torch.distributed.get_rank() == 0:
        folders = [tempfile.mkdtemp(prefix="fp8-model-")]
    torch.distributed.broadcast_object_list(folders)
    try:
        save_distributed(plain, Path(folders[0]))
        loaded = load_distributed(pipeline.model, Path(folders[0]))
    finally:
        torch.distributed.barrier()
        shutil.rmtree(folders[0], ignore_errors=True)
    pipeline.optimizer.reload_model_params()
    answer = f"differ from checkpoint {differing(pipeline, lambda name, _: state[name])}"
    if _takes_state_dict(pipeline):
        pipeline.optimizer.reload_model_params(state_dict=loaded)
        answer += f", with state_dict= {differing(pipeline, lambda name, _: state[name])}"
    return answer


def case_d(options: Options, disk: torch.dtype) -> str:
    """Losses of three steps from equal weights: with the defect, and with masters set by hand."""
    losses = []
    for by_hand in (False, True):
        pipeline = build(options)
        state = reference(pipeline.model, disk)
        load(pipeline.model, state)
        pipeline.optimizer.reload_model_params()
        try:
            if by_hand:
                set_masters(pipeline, state)
            losses.append(" -> ".join(f"{train_step(pipeline):.4f}" for _ in range(3)))
        except ValueError as error:
            losses.append(str(error))
    return f"loss {losses[0]}; with masters set by hand {losses[1]}"


CASES = {"B": case_b, "C": case_c, "E": case_e, "T": case_t, "D": case_d}


def run(case: str, options: Options, disk: torch.dtype) -> str:
    """The answer of *case*, with a checkpoint of dtype *disk*."""
    warnings.simplefilter("ignore")
    initialize(options)
    return CASES[case](options, disk)
