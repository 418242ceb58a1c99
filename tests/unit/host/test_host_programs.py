"""The driver's programs: found in its root, run without a shell, with a time limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from dra.host.paths import HostPaths
from dra.host.programs import NOT_RUN, find_program, run_bounded


def program(root, text, *, at="usr/bin/nvidia-smi", mode=0o755):
    path = root / at
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(mode)
    return path


def paths(root):
    return HostPaths(driver_root_host="/run/nvidia/driver", driver_root=root)


def test_a_program_runs_with_its_arguments_and_the_drivers_libraries(tmp_path):
    program(tmp_path, "import os, sys; print(sys.argv[1:], os.environ['LD_LIBRARY_PATH'])")
    (tmp_path / "usr/lib64").mkdir()
    found = find_program(paths(tmp_path), "nvidia-smi")
    end = found.run("-i", "a b; rm -rf /", seconds=60)
    assert (end.status, end.output.strip()) == (0, f"['-i', 'a b; rm -rf /'] {tmp_path}/usr/lib64")


def test_nothing_of_this_processs_environment_is_handed_on(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    program(tmp_path, "import os; print(sorted(k for k in os.environ if k in ('SECRET', 'PATH', 'MORE')))")
    end = find_program(paths(tmp_path), "nvidia-smi").run(seconds=60, environment={"MORE": "x"})
    assert end.output.strip() == "['MORE', 'PATH']"


def test_links_of_the_root_are_the_roots(tmp_path):
    real = program(tmp_path, "print('here')", at="opt/nvidia/smi")
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/nvidia-smi").symlink_to("/opt/nvidia/smi")
    found = find_program(paths(tmp_path), "nvidia-smi")
    assert (found.inside, found.here) == ("/opt/nvidia/smi", str(real))


@pytest.mark.parametrize("there", [False, True])
def test_a_program_that_is_not_there_or_not_to_be_run_is_none(tmp_path, there):
    if there:
        program(tmp_path, "", mode=0o644)
    assert find_program(paths(tmp_path), "nvidia-smi") is None


def test_one_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    pids = tmp_path / "pids"
    text = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    program(tmp_path, text)
    # Long enough for it to come up on a busy machine.
    end = find_program(paths(tmp_path), "nvidia-smi").run(seconds=5)
    assert (end.status, end.timed_out) == (NOT_RUN, True)
    assert "did not end within 5 s" in end.words
    deadline = time.monotonic() + 60
    while pids.exists() and any(alive(pid) for pid in pids.read_text().split()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: str) -> bool:
    try:
        state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_what_cannot_be_run_is_said():
    end = run_bounded(["/nowhere/program"], seconds=5, environment={})
    assert end.status == NOT_RUN
    assert "/nowhere/program" in end.words


def test_status_output_and_input_are_handed_through():
    code = "import sys; print(sys.stdin.read().upper()); print('bad', file=sys.stderr); sys.exit(3)"
    end = run_bounded([sys.executable, "-c", code], seconds=60, environment={}, stdin="text")
    assert end.status == 3
    assert set(end.output.split()) == {"TEXT", "bad"}


@pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
def test_a_root_that_is_a_whole_file_system_is_entered(tmp_path):
    true = shutil.which("true")
    libraries = subprocess.run(["ldd", true], capture_output=True, text=True, check=False).stdout
    files = [word for word in libraries.split() if word.startswith("/")]
    if not any("ld-linux" in path for path in files):
        pytest.skip("the loader of this machine is not known")
    for path in (true, *files):
        copy = tmp_path / path.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    found = find_program(paths(tmp_path), "true")
    assert found.enter
    assert "LD_LIBRARY_PATH" not in found.environment
    end = found.run(seconds=60)
    if "Operation not permitted" in end.output:
        pytest.skip("this process may not enter another root")
    assert end.status == 0, end.output
