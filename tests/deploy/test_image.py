"""The image: its Dockerfile is linted, and what its build stage assembles runs, for both processors.

There is no engine here: the build stage's commands run as they are, and what they make runs with nothing else on its
path. That costs downloads, so it is done where DRA_TEST_IMAGE is set; the rest always.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile

import pytest

from dra.cli.main import COMMANDS
from tests.deploy.chart import ROOT, TOOLS, container_of, needs, render

IMAGE = ROOT / "deploy/image"
DOCKERFILE = (IMAGE / "Dockerfile").read_text()
# Of Debian 12 and Python without shell. Source: the registry's figure for amd64, rounded up.
BASE_BYTES = 25 << 20
MOST_BYTES = 120 << 20

slow = pytest.mark.skipif(
    not os.environ.get("DRA_TEST_IMAGE"), reason="downloads wheels: set DRA_TEST_IMAGE=1"
)


def test_the_linter_has_nothing_to_say():
    needs("hadolint")
    done = subprocess.run(
        [str(TOOLS / "hadolint"), str(IMAGE / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def stages():
    return re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]


def test_the_last_stage_runs_nothing_and_has_no_shell_to_run():
    build, final = stages()
    assert "slim" in build.splitlines()[0] and "${BASE}" in final.splitlines()[0]
    assert "ARG BASE=gcr.io/distroless/" in DOCKERFILE
    words = [line.split()[0] for line in final.splitlines() if re.match(r"^[A-Z]+ ", line)]
    assert "RUN" not in words and words.count("COPY") == 1
    # In the exec form: the other one would need a shell.
    assert re.search(r'^ENTRYPOINT \["/usr/local/bin/dra"\]$', final, re.MULTILINE)


def test_what_the_build_copies_is_let_through_and_nothing_else():
    wanted = set(re.findall(r"^COPY (?!--from)(\S+)", DOCKERFILE, re.MULTILINE))
    allowed = {
        line[1:]
        for line in (IMAGE / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert wanted == allowed
    assert all((ROOT / path).exists() for path in wanted)


def test_every_requirement_has_hashes_and_a_version():
    text = (ROOT / "requirements/run.txt").read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert len(entries) > 10
    for entry in entries:
        assert re.match(r"[\w.\[\]-]+==[\w.]+", entry) and "--hash=sha256:" in entry, entry[:60]


def test_the_manifests_call_what_the_image_has():
    values = {"webhook": {"enabled": True}}
    workloads = [each for each in render(values) if each["kind"] in ("DaemonSet", "Deployment", "Job")]
    assert len(workloads) == 5
    for each in workloads:
        program, command, *_ = container_of(each)["command"]
        assert program == "dra" and command in COMMANDS
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            exec_ = (container_of(each).get(probe) or {}).get("exec")
            assert exec_ is None or exec_["command"][0] == "dra"


def test_nothing_of_the_driver_starts_a_shell_or_a_program_of_the_image():
    """The base has no programs: what is run comes from the driver root, or is Python."""
    for path in (ROOT / "dra").rglob("*.py"):
        if path.is_relative_to(ROOT / "dra/sim"):
            continue
        text = path.read_text()
        assert "shell=True" not in text and "os.system(" not in text, path
        assert not re.search(r'\[\s*"(?:sh|bash|chroot|umount|mount|nsenter|modprobe)"', text), path


def assemble(out, *words):
    subprocess.run(
        [sys.executable, str(IMAGE / "assemble.py"), *words, "--out", str(out)], check=True, timeout=600
    )


def digest_of(folder):
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(
            f"{path.relative_to(folder)} {path.lstat().st_mode:o} {path.lstat().st_mtime:.0f}\n".encode()
        )
        if path.is_file() and not path.is_symlink():
            found.update(path.read_bytes())
    return found.hexdigest()


def run(root, *words, **environment):
    """Run the image's program with the image's files and nothing else."""
    variables = {
        "PATH": "/nonexistent",
        "PYTHONPATH": str(root / "usr/lib/dra"),
        "PYTHONDONTWRITEBYTECODE": "1",
        **environment,
    }
    return subprocess.run(
        [sys.executable, "-sS", str(root / "usr/local/bin/dra"), *words],
        env=variables, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["amd64", "arm64"])
def test_the_build_stage_makes_the_same_small_root_twice(tmp_path, arch):
    for name in ("one", "two"):
        assemble(tmp_path / name, "libraries", "--arch", arch)
        assemble(tmp_path / name, "package")
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "two")
    root = tmp_path / "one"
    machine = {"amd64": 62, "arm64": 183}[arch]
    libraries = list(root.rglob("*.so"))
    assert libraries
    for library in libraries:
        assert int.from_bytes(library.read_bytes()[18:20], "little") == machine, library
    packed = tmp_path / "layer.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(root, ".")
    assert packed.stat().st_size + BASE_BYTES < MOST_BYTES
    assert not list(root.rglob("tests")) and not (root / "usr/lib/dra/pip").exists()


@slow
@pytest.mark.timeout(900)
def test_what_was_assembled_runs_with_nothing_else_on_its_path(tmp_path):
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the image's Python is 3.11")
    import platform

    arch = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    assemble(tmp_path / "root", "libraries", "--arch", arch)
    assemble(tmp_path / "root", "package")
    before = digest_of(tmp_path / "root")
    assert run(tmp_path / "root", "--version").stdout.startswith("dra ")
    for command in COMMANDS:
        done = run(tmp_path / "root", command, "--help")
        assert done.returncode == 0, (command, done.stderr)
    found = run(tmp_path / "root", "inventory", "--simulate", "t4-x1")
    assert found.returncode == 0 and "Tesla T4" in found.stdout, found.stderr
    assert run(tmp_path / "root", "doctor", "--simulate", "t4-x1", "--offline").returncode >= 10
    # A read-only root: nothing was written into it.
    assert digest_of(tmp_path / "root") == before
