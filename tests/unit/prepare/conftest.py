from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from prepare_fakes import Node  # noqa: E402


@pytest.fixture
def node(tmp_path):
    made = Node(tmp_path)
    yield made
    made.api.release()
