"""``reload_model_params(state_dict=...)``: the pipeline itself says which tensors the masters come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mcore_patch._stations.guard import standing_aside
from mcore_patch._stations.matching import StateDictMismatchError, match
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
            with standing_aside("remembering the state dict given to a reload", StateDictMismatchError):
                for name, parameter, tensor in match(optimizer, state_dict, line.quirks.state_dict_normalizers):
                    memory.loaded(parameter, tensor, ORIGIN, name=name)
        yield


def each(original: Callable[..., None], optimizer: Any, state_dict: Any) -> None:
    """The release's own reload, inside :func:`given`; only optimizers that we do not know get the state dict itself."""
    chained = getattr(optimizer, "chained_optimizers", None)
    unknown: list[Any] = []
    if state_dict is not None:
        with standing_aside("looking for optimizers that we do not know"):
            unknown = [child for child in chained or [optimizer] if strangers(child)]
    if not unknown:
        original(optimizer)
    elif chained is None:
        original(optimizer, state_dict)
    else:
        for child in chained:
            known = all(child is not each for each in unknown)
            child.reload_model_params(**({} if known else {"state_dict": state_dict}))
