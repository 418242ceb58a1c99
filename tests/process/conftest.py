"""Nodes for the process tests."""

from __future__ import annotations

import pytest

from tests.process.harness import Node


@pytest.fixture
def node():
    made = Node()
    yield made
    made.close()
