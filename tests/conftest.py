"""What holds for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import settings

# By default the same examples are tried each time: a run that fails can be run again, and a loaded machine fails none.
# HYPOTHESIS_PROFILE=explore looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None, database=None, print_blob=False)
settings.register_profile("explore", derandomize=False, deadline=None, database=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def quiet() -> None:
    """Let events of the log go nowhere; `structlog.testing.capture_logs` still sees them."""
    structlog.reset_defaults()
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.add_log_level],
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )


quiet()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process sets logging up; the next test does not inherit it."""
    yield
    quiet()
