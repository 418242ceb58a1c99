"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process sets logging up; the next test does not inherit it."""
    yield
    structlog.reset_defaults()
