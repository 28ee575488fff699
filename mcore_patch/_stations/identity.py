"""A typed face for torch's weak dictionary: tensors as keys, compared by identity, gone when they die."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

V = TypeVar("V")


class ByIdentity(Generic[V]):
    """``tensor -> V`` for as long as the tensor lives. In the order of insertion."""

    def __init__(self) -> None:
        self._entries: Any = WeakIdKeyDictionary()

    def get(self, tensor: torch.Tensor) -> V | None:
        """The entry of ``tensor``, or None."""
        found: V | None = self._entries.get(tensor)
        return found

    def __setitem__(self, tensor: torch.Tensor, value: V) -> None:
        self._entries[tensor] = value

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[V]:
        """The entries of the living tensors."""
        return iter(list(self._entries.values()))

    def drop(self, tensor: torch.Tensor) -> None:
        """Forget ``tensor``, if it is known."""
        self._entries.pop(tensor, None)

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
