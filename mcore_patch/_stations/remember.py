"""Station 2: what the checkpoint says of each parameter, by the identity of the Parameter.

Nothing is copied: a remembered source is the tensor that the pipeline itself loaded. It goes when the masters are
written, when another load replaces it, when optimizer state restores the masters, when the parameter dies, or at the
first forward pass of a module that holds the parameter (a model that only ever infers must not keep a second copy).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from mcore_patch._stations import quantized
from mcore_patch._stations.guard import standing_aside
from mcore_patch._stations.identity import ByIdentity
from mcore_patch._stations.parameters import can_be_compared, is_plain, loses_in


@dataclass(frozen=True)
class Source:
    """The checkpoint's tensor for a parameter: the parameter's shape, the dtype on disk, on any device."""

    tensor: torch.Tensor
    name: str
    origin: str
    version: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype on disk."""
        return self.tensor.dtype

    @property
    def untouched(self) -> bool:
        """Whether nobody has written to the tensor in place since it was remembered."""
        return self.tensor._version == self.version


@dataclass(frozen=True)
class Settled:
    """A master of ``optimizer`` that was written from the checkpoint: from then on the master itself is the source.

    ``start`` and ``stop`` are the range of the flattened parameter that it covers, ``dtype`` the one on disk;
    ``check`` is a checksum of the parameter there, where the master cannot tell whether it was changed since. Nothing
    is held alive.
    """

    optimizer: weakref.ref[Any]
    start: int
    stop: int
    name: str
    dtype: torch.dtype
    check: torch.Tensor | None = None


@dataclass(frozen=True)
class Exact:
    """The last load of a parameter lost nothing: ``dtype`` on disk."""

    name: str
    dtype: torch.dtype


class Memory:
    """What the checkpoint says of each parameter. One per process; keys are weak and compare by identity."""

    def __init__(self) -> None:
        self._known: ByIdentity[Source | Settled | Exact] = ByIdentity()
        self._originals: ByIdentity[torch.Tensor] = ByIdentity()
        self._seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._hook: RemovableHandle | None = None

    def loaded(
        self,
        parameter: torch.nn.Parameter,
        tensor: object,
        origin: str,
        *,
        name: str,
        will_be: torch.dtype | None = None,
    ) -> None:
        """A load has put ``tensor`` (any dtype, the parameter's shape) into ``parameter``; remember it if that lost.

        ``name`` is the parameter's in the state dict, for the report.

        ``will_be`` is the dtype that a parameter which is fp32 now is going to be cast to (``Float16Module`` casts
        fp32 norms long after a load into the bare model). A tensor that cannot be a source (another shape, a
        subclass, meta, an integer) is passed over, as are frozen parameters.
        """
        if not parameter.requires_grad or not isinstance(tensor, torch.Tensor):
            return
        tensor = self._originals.get(tensor) if tensor in self._originals else tensor
        assert tensor is not None
        if not can_be_compared(parameter) or tensor.shape != parameter.shape:
            return
        if not is_plain(tensor):
            if quantized.is_quantized(tensor):  # the values are gone, and those of an earlier load no longer hold
                self.forget(parameter)
            return
        if not loses_in(tensor.dtype, parameter, will_be):
            self._known[parameter] = Exact(name, tensor.dtype)
            self._watch()
            return
        value = tensor.detach()
        if same_memory(value, parameter):
            # The parameter's own memory would follow every later edit of the parameter, so it could not be checked.
            value = value.clone()
        self._known[parameter] = Source(value, name, origin, value._version)
        self._watch()

    def stands_for(self, tensor: torch.Tensor, original: torch.Tensor) -> None:
        """``tensor``, which the pipeline gets from a load, was made from ``original``, the checkpoint's."""
        self._originals[tensor] = original

    def known(self, parameter: torch.nn.Parameter) -> Source | Settled | Exact | None:
        """What the last load of ``parameter`` was, and whether its master has been written since."""
        return self._known.get(parameter)

    def source(self, parameter: torch.nn.Parameter) -> Source | None:
        """The remembered tensor of ``parameter``, if there is one."""
        known = self.known(parameter)
        return known if isinstance(known, Source) else None

    def settle(self, parameter: torch.nn.Parameter, settled: Settled) -> None:
        """The master of ``parameter`` now holds the checkpoint's value; drop the source."""
        self._known[parameter] = settled
        self._watch()

    def settled(self, parameter: torch.nn.Parameter) -> Settled | None:
        """The master that was written from the checkpoint for ``parameter``, if that still stands."""
        known = self.known(parameter)
        return known if isinstance(known, Settled) else None

    def name(self, parameter: torch.nn.Parameter) -> str | None:
        """What the state dict of its last load called ``parameter``."""
        known = self.known(parameter)
        return known.name if known is not None else None

    @contextmanager
    def let_go(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """Hold no weak references to ``parameters`` for a while, and then know them again.

        torch swaps the contents of subclass parameters when a module is cast or moved (``Module._apply``), and refuses
        that where weak references to them exist. The objects stay the same, so what is known of them stays true.
        """
        known: list[tuple[torch.nn.Parameter, Source | Settled | Exact | None]] = []
        with standing_aside("letting go of parameters that may be swapped", otherwise=self.clear):
            known += [(each, self.known(each)) for each in parameters]
            for parameter, _ in known:
                self.forget(parameter)
        try:
            yield
        finally:
            with standing_aside("knowing parameters again that may have been swapped"):
                for parameter, what in known:
                    if what is not None:
                        self._known[parameter] = what

    def forget(self, parameter: torch.nn.Parameter) -> None:
        """Drop what the last load said of ``parameter``."""
        self._known.drop(parameter)

    def settled_optimizers(self) -> list[Any]:
        """Strong references to the optimizers of all settled masters, for as long as the caller needs them alive."""
        return [known.optimizer() for known in self._known if isinstance(known, Settled)]

    def __len__(self) -> int:
        """How many parameters have a remembered tensor."""
        return sum(isinstance(known, Source) for known in self._known)

    @property
    def empty(self) -> bool:
        """Whether nothing is known of any load."""
        return not self._known

    def clear(self) -> None:
        """Forget everything (``revert()`` does)."""
        self._known.clear()
        self._originals.clear()
        self._unwatch()

    def _watch(self) -> None:
        self._seen.clear()
        if self._hook is None:
            self._hook = register_module_forward_pre_hook(self._before_forward)

    def _unwatch(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._seen.clear()

    def _before_forward(self, module: torch.nn.Module, _args: object) -> None:
        """Release what belongs to a module that is about to run; each module is walked once between two loads."""
        with standing_aside("forgetting the weights of a module that runs"):
            if module not in self._seen:
                self._seen.add(module)
                for parameter in module.parameters():
                    self.forget(parameter)
            if self.empty:
                self._unwatch()


def same_memory(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether ``tensor`` is ``parameter``, of the same dtype, under another name."""
    same_kind = tensor.dtype is parameter.dtype and tensor.device == parameter.device
    # Those without elements are all at no address.
    return same_kind and tensor.numel() > 0 and tensor.data_ptr() == parameter.data_ptr()


memory = Memory()
