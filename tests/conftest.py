"""What holds for all tests."""

from __future__ import annotations

import compileall
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

from tests.places import SHORT

ROOT = Path(__file__).parents[1]

# For pytest's own directories and those of the processes that tests start.
os.environ.setdefault("TMPDIR", SHORT)
tempfile.tempdir = None

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


def pytest_configure(config: pytest.Config) -> None:
    """Compile what is younger than its bytecode, once: each of the hundreds of processes that the tests start would do
    so anew where Python may not write bytecode.
    """
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(ROOT / "dra", quiet=2)


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


def pytest_collection_finish() -> None:
    """Take what was collected out of the garbage collector's sight: it stays to the end, and is a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process sets logging up; the next test does not inherit it."""
    yield
    quiet()
