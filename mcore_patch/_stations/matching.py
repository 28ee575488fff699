"""Find the tensor of each parameter in a state dict by its name, in time linear in the number of names.

Upstream (0.14+) compares every parameter's name with every key: 31,000 parameters take a minute, and until 0.16.1
``...weight1`` also matches ``...weight10`` (NVIDIA/Megatron-LM pull 3569).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mcore_patch._stations.optimizers import holder_of, members, model_chunks, strip_module
from mcore_patch._stations.parameters import explains
from mcore_patch._stations.remember import memory

_SHOWN = 5


class StateDictMismatchError(AssertionError, ValueError):
    """A state dict given to ``reload_model_params`` does not fit the parameters that the optimizer steps.

    An AssertionError as well, because that is what upstream raises (0.14+).
    """


Match = tuple[str, torch.nn.Parameter, torch.Tensor]


def match(optimizer: Any, state_dict: Any, normalizers: Iterable[str] = ()) -> list[Match]:
    """Name, parameter and tensor of every parameter that ``optimizer`` (chained or not) steps.

    ``state_dict`` may be flat, or hold ``model``, or ``model0``.., or ``model_0``.. as upstream accepts them; keys and
    names may have any number of ``module.`` prefixes. ``normalizers`` names static methods of the optimizer's class
    that rewrite a flat dict for a chunk in place (upstream's own, for grouped and fused weights); they get a copy.
    A parameter that is in no chunk the optimizer knows of (a Float16OptimizerWithFloat16Params knows of none) goes by
    the name that it had in the load which brought it.

    Raises :class:`StateDictMismatchError`, naming the first few parameters that are missing or of another shape.
    """
    found_chunks = model_chunks(optimizer)
    owned = {id(parameter): parameter for member in members(optimizer) for parameter in _steps(member)}
    matched: list[Match] = []
    wrong: list[str] = []
    for chunk, flat in zip(found_chunks, _per_chunk(state_dict, len(found_chunks)), strict=True):
        wanted = {
            strip_module(name): parameter for name, parameter in chunk.named_parameters() if id(parameter) in owned
        }
        found = _by_name(wanted, flat)
        if len(found) < len(wanted):
            found = _by_name(wanted, _normalized(optimizer, flat, chunk, normalizers))
        for name, parameter in wanted.items():
            del owned[id(parameter)]
            tensor = found.get(name)
            if tensor is None:
                wrong.append(f"{name}: {tuple(parameter.shape)} expected, not in the state dict")
            elif tensor.shape != parameter.shape:
                wrong.append(f"{name}: {tuple(parameter.shape)} expected, {tuple(tensor.shape)} found")
            else:
                matched.append((name, parameter, tensor))
    _match_by_last_load(owned.values(), state_dict, matched, wrong)
    if wrong:
        more = f" (and {len(wrong) - _SHOWN} more)" if len(wrong) > _SHOWN else ""
        raise StateDictMismatchError(
            f"reload_model_params(state_dict=...): {len(wrong)} of {len(wrong) + len(matched)} parameters have no "
            f"tensor of their shape: {'; '.join(wrong[:_SHOWN])}{more}. Pass the model's state dict of this rank (flat "
            "or under 'model', 'model0'..), or call reload_model_params() without it to use the loaded parameters."
        )
    return matched


def _steps(member: Any) -> Iterable[torch.nn.Parameter]:
    holder = holder_of(member)
    return () if holder is None else holder.owned(member)


def _per_chunk(state_dict: Any, count: int) -> list[Mapping[str, Any]]:
    for prefix in ("model", "model_"):
        if f"{prefix}0" in state_dict:
            keys = [f"{prefix}{index}" for index in range(count)]
            missing = [key for key in keys if key not in state_dict]
            if missing:
                raise StateDictMismatchError(
                    f"reload_model_params(state_dict=...): {count} model chunks expected in the state dict, but it has "
                    f"no {missing[0]!r}. Pass the state dict of all chunks of this rank."
                )
            return [state_dict[key] for key in keys]
    if count > 1:
        raise StateDictMismatchError(
            f"reload_model_params(state_dict=...): {count} model chunks need 'model0'.. 'model{count - 1}' in the "
            f"state dict; found {sorted(map(str, state_dict))[:_SHOWN]}."
        )
    inner = state_dict.get("model")
    return [inner if isinstance(inner, Mapping) else state_dict] * count


def _match_by_last_load(
    parameters: Iterable[torch.nn.Parameter], state_dict: Any, matched: list[Match], wrong: list[str]
) -> None:
    """Add to ``matched`` and ``wrong`` what is in no chunk, by what the last load called it (``model0.decoder...``)."""
    of_chunks = [value for key, value in state_dict.items() if key.startswith("model") and isinstance(value, Mapping)]
    flats = [{strip_module(key): value for key, value in flat.items()} for flat in of_chunks or [state_dict]]
    for parameter in parameters:
        name = memory.name(parameter) or "?"
        first, _, rest = name.partition(".")
        bare = strip_module(rest if first.startswith("model") else name)
        found = [flat[key] for flat in flats for key in (name, bare) if key in flat]
        fitting = [tensor for tensor in found if tensor.shape == parameter.shape]
        if not fitting:
            known = "no load of it was seen, so its name is not known" if name == "?" else "not in the state dict"
            instead = f"{tuple(found[0].shape)} found" if found else known
            wrong.append(f"{bare}: {tuple(parameter.shape)} expected, {instead}")
            continue
        # Several chunks may use one name.
        explaining = (tensor for tensor in fitting if explains(parameter, tensor.reshape(-1)))
        matched.append((bare, parameter, next(explaining, fitting[0])))


def _by_name(wanted: Mapping[str, torch.nn.Parameter], flat: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {strip_module(key): value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    if not any(name in tensors for name in wanted):
        # Some pipelines put one more prefix before every key; upstream accepts any.
        first = next(iter(wanted), None)
        longer = [key for key in tensors if first is not None and key.endswith(f".{first}")]
        if first is not None and len(longer) == 1:
            prefix = longer[0].removesuffix(first)
            tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
    return {name: tensors[name] for name in wanted if name in tensors}


def _normalized(
    optimizer: Any, flat: Mapping[str, Any], chunk: torch.nn.Module, normalizers: Iterable[str]
) -> dict[str, Any]:
    copy = {strip_module(key): value for key, value in flat.items()}
    for name in normalizers:
        for member in members(optimizer):
            normalize = getattr(member, name, None)
            if normalize is not None:
                normalize(copy, chunk)
                break
    return copy
