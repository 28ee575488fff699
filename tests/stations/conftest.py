"""What several of the tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny


@pytest.fixture
def patched() -> Iterator[None]:
    """The stand-in for megatron-core, patched."""
    with tiny.installed(), tiny.patched():
        yield
