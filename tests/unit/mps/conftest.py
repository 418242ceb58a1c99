from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from keeper_rig import KeeperRig  # noqa: E402

from tests.places import SHORT


@pytest.fixture
def rig():
    """A simulated node with the stand-in of the control daemon in its driver root; what was started is ended."""
    root = Path(tempfile.mkdtemp(prefix="mps", dir=SHORT))
    made = KeeperRig(root)
    yield made
    made.close()
    shutil.rmtree(root, ignore_errors=True)
