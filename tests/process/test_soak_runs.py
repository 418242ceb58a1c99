"""The soak itself: a short one, by option; `make soak` is the long one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.skipif(
    not os.environ.get("DRA_TEST_SLOW"), reason="half a minute; set DRA_TEST_SLOW=1, or run make soak"
)
def test_random_claims_faults_and_restarts_leave_the_node_as_asked():
    command = [sys.executable, "-m", "tests.soak", "--seconds", "20", "--seed", "5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "all held" in done.stdout
