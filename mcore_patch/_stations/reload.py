"""``reload_model_params(state_dict=...)``: the pipeline itself says which tensors the masters come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mcore_patch._stations.matching import match
from mcore_patch._stations.optimizers import strangers
from mcore_patch._stations.remember import memory
from mcore_patch._stations.report import reporter

if TYPE_CHECKING:
    from mcore_patch.compat import ReleaseLine

ORIGIN = "reload_model_params(state_dict=...)"


@contextmanager
def given(optimizer: Any, state_dict: Any, line: ReleaseLine) -> Iterator[None]:
    """Around a reload: remember the tensors of ``state_dict``, so that one path serves all releases.

    Upstream's own path (0.14+) is not taken: it forgets MoE experts, matches names by substring, takes quadratic time
    and loses precision. Raises :class:`~mcore_patch._stations.matching.StateDictMismatchError` before any master is
    touched.
    """
    with reporter.event():
        if state_dict is not None:
            for name, parameter, tensor in match(optimizer, state_dict, line.quirks.state_dict_normalizers):
                memory.loaded(parameter, tensor, ORIGIN, name=name)
        yield


def each(original: Callable[..., None], optimizer: Any, state_dict: Any) -> None:
    """The release's own reload, inside :func:`given`; only optimizers that we do not know get the state dict itself."""
    if state_dict is None or not strangers(optimizer):
        original(optimizer)
    elif not hasattr(optimizer, "chained_optimizers"):
        original(optimizer, state_dict)
    else:
        for child in optimizer.chained_optimizers:
            child.reload_model_params(**({"state_dict": state_dict} if strangers(child) else {}))
