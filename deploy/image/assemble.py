"""What the image holds beside its base: the libraries with their hashes, this package, and the program `dra`.

Runs in the image's build stage, in two steps so that the libraries' layer lasts; and in a test, for both processors. The
same inputs give the same bytes: files are compiled without times, and all have one date.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2]
LIBRARIES = "usr/lib/dra"
PROGRAM = "usr/local/bin/dra"
# The base image's.
PYTHON_VERSION = "3.11"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
# Newest first: Debian 12 has glibc 2.36.
PLATFORMS = (
    "manylinux_2_35",
    "manylinux_2_34",
    "manylinux_2_31",
    "manylinux_2_28",
    "manylinux_2_17",
    "manylinux2014",
)
# Nobody in the image reads these.
NOT_NEEDED = (
    "**/tests",
    "**/test",
    "**/*.pyi",
    "**/*.pyx",
    "**/*.pxd",
    "kubernetes/docs",
    "bin",
    "**/direct_url.json",
    "**/RECORD",
)
_SCRIPT = """#!/usr/bin/python3
import sys

from dra.cli.main import main

sys.exit(main())
"""


def main() -> int:
    """Do one of the two steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=("libraries", "package"))
    parser.add_argument("--arch", choices=sorted(MACHINES), help="of the image")
    parser.add_argument("--out", type=Path, required=True, help="what becomes the image's /")
    args = parser.parse_args()
    if args.step == "libraries":
        if not args.arch:
            parser.error("--arch is needed")
        install_libraries(args.out, MACHINES[args.arch])
    else:
        install_package(args.out)
    same_dates(args.out)
    return 0


def install_libraries(out: Path, machine: str) -> None:
    """Install requirements/run.txt for a processor: wheels only, each with the hash that is written there."""
    target = out / LIBRARIES
    target.mkdir(parents=True)
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", "--no-deps",
        "--require-hashes", "--only-binary=:all:", "--implementation=cp", f"--python-version={PYTHON_VERSION}",
        *(f"--platform={platform}_{machine}" for platform in PLATFORMS),
        f"--target={target}", "--requirement", str(SOURCE / "requirements/run.txt"),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    for pattern in NOT_NEEDED:
        for path in sorted(target.glob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    compile_all(target)


def install_package(out: Path) -> None:
    """Put this package and the program in place."""
    target = out / LIBRARIES / "dra"
    shutil.copytree(
        SOURCE / "dra", target, ignore=shutil.ignore_patterns("__pycache__", "*.pyi"), dirs_exist_ok=True
    )
    compile_all(target)
    program = out / PROGRAM
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(_SCRIPT)
    program.chmod(0o755)


def compile_all(folder: Path) -> None:
    """Compile for a read-only root: nothing is checked against times, which are the same everywhere anyway."""
    compileall.compile_dir(
        str(folder), quiet=2, force=True, workers=0, stripdir=str(folder),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip


def same_dates(out: Path) -> None:
    """Give everything one date and plain rights."""
    moment = int(os.environ.get("SOURCE_DATE_EPOCH") or 0)
    for path in sorted(out.rglob("*"), reverse=True):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        os.utime(path, (moment, moment), follow_symlinks=False)


if __name__ == "__main__":
    sys.exit(main())
