"""Fixtures for all tests."""

import os
from collections.abc import Iterator

import pytest

from tests.distributed import RankPool

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's pool of ranks; its processes start with the first job."""
    pool = RankPool()
    yield pool
    pool.close()
