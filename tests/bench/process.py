"""What a process takes, read from outside: CPU, wake-ups, memory by what it is, and the time of its imports."""

from __future__ import annotations

import compileall
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

MIB = 1 << 20


def cpu_seconds(pid: int) -> float:
    """User and system time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wake_ups(pid: int) -> int:
    """How often its threads have gone to sleep so far, and so were woken. Source: proc(5), voluntary_ctxt_switches."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        match = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.MULTILINE)
        total += int(match[1]) if match else 0
    return total


def idle(pid: int, seconds: float) -> tuple[float, float]:
    """Give the CPU in percent of a core and the wake-ups a second of a process that has nothing to do."""
    cpu, woken, began = cpu_seconds(pid), wake_ups(pid), time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    return (cpu_seconds(pid) - cpu) / passed * 100, (wake_ups(pid) - woken) / passed


def memory(pid: int) -> dict[str, float]:
    """Give resident, proportional and anonymous memory in MiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = {
        name: float(value.split()[0]) * 1024 / MIB
        for name, _, value in (line.partition(":") for line in lines)
    }
    return {name: fields[name] for name in ("Rss", "Pss", "Anonymous")}


def memory_by_map(pid: int) -> dict[str, tuple[float, float, float]]:
    """Give resident, proportional and anonymous MiB by what is mapped: a file's name, the heap, stacks, the rest; largest
    first.
    """
    resident: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    anonymous: Counter[str] = Counter()
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            name = _name_of(words[5] if len(words) > 5 else "")
        elif words[0] == "Rss:":
            resident[name] += int(words[1])
        elif words[0] == "Pss:":
            parts[name] += int(words[1])
        elif words[0] == "Anonymous:":
            anonymous[name] += int(words[1])
    return {
        name: (kib / 1024, parts[name] / 1024, anonymous[name] / 1024) for name, kib in resident.most_common()
    }


def _name_of(path: str) -> str:
    if not path:
        return "[anonymous]"
    return path if path.startswith("[") else re.sub(r"\.cpython-.*", "", Path(path).name)


def compile_modules() -> None:
    """Compile the project's modules, as the image has them: else each start would compile them anew where Python may not
    write.
    """
    compileall.compile_dir(Path(__file__).parents[2] / "dra", quiet=1)


def import_seconds(module: str) -> dict[str, float]:
    """Give the seconds of each module that comes with a module, imported in a new process; the slowest first."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {module}"],
        capture_output=True,
        text=True,
        check=True,
    )
    modules: Counter[str] = Counter()
    # Those that were loaded with the interpreter come before `site`, which every program pays.
    seen_site = False
    for line in done.stderr.splitlines():
        match = re.fullmatch(r"import time:\s+(\d+) \|\s+\d+ \| (\s*)(\S+)", line)
        if match is None:
            continue
        if seen_site:
            modules[match[3]] += int(match[1])
        seen_site = seen_site or match[3] == "site"
    return {name: micros / 1e6 for name, micros in modules.most_common()}


def by_package(modules: dict[str, float]) -> dict[str, float]:
    """Sum the seconds of modules up by package (of `dra`: by room); the slowest first."""
    parts: Counter[str] = Counter()
    for name, seconds in modules.items():
        parts[package_of(name)] += round(seconds * 1e6)
    return {name: micros / 1e6 for name, micros in parts.most_common()}


def package_of(module: str) -> str:
    """Give the room of a module of ours, the top package of another's, or `python`."""
    words = module.split(".")
    if words[0] == "dra":
        return ".".join(words[:2])
    if words[0].lstrip("_") in _STDLIB or words[0] in _STDLIB:
        return "python"
    return words[0]


_STDLIB = sys.stdlib_module_names
