"""Programs run inside another root, without any program of ours around them."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from dra.host.chroot import chroot_command


def test_what_cannot_be_entered_or_is_not_there_ends_with_127(tmp_path):
    for root in (tmp_path / "none", tmp_path):
        done = subprocess.run(
            chroot_command(str(root), ["/bin/none"]), env={}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 127 and str(root) in done.stderr


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ldd") is None, reason="needs root and ldd")
def test_a_program_sees_the_root_as_its_own(tmp_path):
    program = shutil.which("ls")
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    files = [program, *(word for line in said.splitlines() for word in line.split() if word.startswith("/"))]
    for file in files:
        target = tmp_path / file.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    (tmp_path / "only-here").touch()
    done = subprocess.run(
        chroot_command(str(tmp_path), [program, "/"]), env={}, capture_output=True, text=True, check=True
    )
    assert "only-here" in done.stdout.split()
