"""What several of the tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny

from mcore_patch._stations import guard


@pytest.fixture
def patched() -> Iterator[None]:
    """The stand-in for megatron-core, patched; none of our steps may fail (a test of one that does clears the list)."""
    with tiny.installed(), tiny.patched():
        yield
        assert not guard._said
