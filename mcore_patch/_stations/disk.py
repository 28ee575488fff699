"""Read single shards of a ``torch_dist`` checkpoint at the dtype on disk, on this rank alone.

For targets that must not be touched: a quantized parameter is quantized by the load itself (megatron-core up to 0.13,
and from 0.19 on by default), and asking for another dtype there would change what the pipeline gets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list


def read(checkpoint_dir: Any, sharded: list[Any]) -> list[torch.Tensor]:
    """The local shards that the ShardedTensors of ``sharded`` stand for: CPU tensors of their ``local_shape``.

    Takes part in no collective. Raises KeyError for a key that the checkpoint lacks, ValueError for another global
    shape, and what the reader raises.
    """
    reader = FileSystemReader(checkpoint_dir)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner = _Shards(metadata, sharded)
    plan = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])[0]
    reader.read_data(plan, planner).wait()
    return [target.view(tuple(each.local_shape)) for target, each in zip(planner.targets, sharded, strict=True)]


def dtypes(checkpoint_dir: Any) -> dict[str, torch.dtype]:
    """The dtype of every tensor, by key."""
    stored = FileSystemReader(checkpoint_dir).read_metadata().state_dict_metadata
    return {key: each.properties.dtype for key, each in stored.items() if isinstance(each, TensorStorageMetadata)}


class _Shards(LoadPlanner):
    """A plan for some shards; a ReadItem finds its target by key and offset."""

    def __init__(self, metadata: Metadata, sharded: list[Any]) -> None:
        self.targets: list[torch.Tensor] = []
        self._items: list[ReadItem] = []
        self._by_place: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        for each in sharded:
            stored = metadata.state_dict_metadata[each.key]
            if not isinstance(stored, TensorStorageMetadata) or tuple(stored.size) != tuple(each.global_shape):
                found = getattr(stored, "size", type(stored).__name__)
                raise ValueError(f"{each.key}: expected a tensor of shape {tuple(each.global_shape)}, found {found}")
            chunk = ChunkStorageMetadata(
                offsets=torch.Size(each.global_offset),
                sizes=torch.Size([1] * each.prepend_axis_num + list(each.local_shape)),
            )
            target = torch.empty(chunk.sizes, dtype=stored.properties.dtype)
            self.targets.append(target)
            self._by_place[each.key, tuple(chunk.offsets)] = target
            self._items += create_read_items_for_chunk_list(each.key, stored, [chunk])

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self._items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        offset = read_item.dest_index.offset
        target = self._by_place[read_item.dest_index.fqn, tuple(offset or ())]
        for dimension, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dimension, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: the reader has copied into the target itself."""

    def set_up_planner(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing to do: set up when made."""

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Nothing to do: no bytes are asked for."""
