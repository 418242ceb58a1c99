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


# Files whose tests start processes and wait for them: few tests, much time.
_LONG = ("e2e", "process", "deploy")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the files that take long, so that none of them is left to one test process at the end."""
    root = config.rootpath / "tests"
    items.sort(
        key=lambda item: (
            not (item.path.is_relative_to(root) and item.path.relative_to(root).parts[0] in _LONG)
        )
    )


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process sets logging up; the next test does not inherit it."""
    yield
    quiet()
