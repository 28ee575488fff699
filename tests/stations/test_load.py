from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint

from mcore_patch._stations.load import dtypes_on_disk


class Strategy:
    """Reads metadata as megatron-core does, and with a torch whose tensors keep what torch.empty() does not take."""

    def load_tensors_metadata(self, _: Any) -> dict[str, torch.Tensor]:
        return {"w": torch.empty(2, strides=(1,))}  # type: ignore[call-overload, no-any-return]


@pytest.mark.skipif(not hasattr(checkpoint, "save"), reason="saving without ranks has come in torch 2.2")
def test_dtypes_on_disk_are_found_where_the_strategy_cannot_tell_them(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2), "b": torch.ones(3, dtype=torch.bfloat16)}
    checkpoint.save(tensors, storage_writer=checkpoint.FileSystemWriter(tmp_path))
    with pytest.raises(TypeError, match="strides"):
        Strategy().load_tensors_metadata(tmp_path)
    assert dtypes_on_disk(Strategy(), tmp_path) == {"w": torch.float32, "b": torch.bfloat16}
