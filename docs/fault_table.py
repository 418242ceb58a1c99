"""The faults that a node or its cluster can have, and what the driver does in each: the text of docs/faults.md.

Tests that show it carry the number: `@pytest.mark.fault("F32")`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"

# Number: (the fault, what the driver does).
FAULTS: dict[str, tuple[str, str]] = {
    "F1": ("The kubelet restarts", "The driver is registered again, claims that run are untouched, and slices that the kubelet wiped come back as they were."),
    "F2": ("The kubelet deletes the node's slices, as it does when it starts", "They are published again at once, with the same content and generation."),
    "F3": ("Sockets of a killed driver are still there", "Those that nobody serves are removed, those of a living instance are left, and the new one serves."),
    "F4": ("SIGTERM while nothing happens", "Sockets go, the process ends with 0, slices and CDI files stay: devices are not withdrawn for a restart."),
    "F5": ("SIGTERM while claims are prepared or unprepared", "A call under way ends or is rolled back; the retry succeeds. Nothing half done stays."),
    "F6": ("Killed at any point of prepare, of its rollback too", "Each change of the node was written down before it was made: the retry gives the same device, unprepare and the sweep clean up, with partitions and MPS daemons."),
    "F7": ("Killed at any point of unprepare", "The next unprepare, or the driver alone, finishes it; one more is answered with success."),
    "F8": ("A claim's record is cut off, empty, random or fails its checksum", "It is set aside and logged, its devices count as held, an Event tells of it, and it is rebuilt from the claim, the CDI file and the hardware. Others are not touched."),
    "F9": ("Records of an older or a newer version", "Older ones are read, fields that are not known are kept, and each record says which version can read it; one that only a newer driver understands is left alone and holds its devices."),
    "F10": ("The state directory is full or read-only", "Prepare fails with an error that names the path and is retried; nothing partial stays; it goes on when there is room, without a restart."),
    "F11": ("The CDI directory is missing, full or read-only, or a file was removed by hand", "It is made, the file is written again by itself and by the next prepare; until then the error names it, and `dra doctor` says what is wrong."),
    "F12": ("CDI files, MPS daemons and temporary files of claims that nobody knows", "Ours are removed within a minute of the start; what belongs to others is left."),
    "F13": ("The machine was rebooted", "Records of the earlier boot hold nothing; what a live claim needs is made again with the device numbers and partitions of this boot."),
    "F14": ("A reboot took partitions that were made by hand, or a GPU", "Slices show what there is. A claim on what is gone fails with an Event, or gets its partition anew where they are made on demand."),
    "F15": ("No API server when the driver starts", "It lives, is registered, answers what needs no API server and is not ready; it tries again with pauses that grow, and publishes soon after the API server is there."),
    "F16": ("The API server takes a request and says nothing", "A new claim is refused after a few seconds, to be retried; other claims are served meanwhile, and the driver still stops when told to."),
    "F17": ("The same, for a claim that is prepared", "After 40 ms it is answered from its record, checked against the node."),
    "F18": ("429, 409, 410, 500, answers that break off", "Retry-After is honoured, 410 leads to a new list, pauses grow; in the end the pool is right, and no request was sent in a hot loop."),
    "F19": ("A watch that is open and silent", "It is given up after 50 s; the next list shows what was missed."),
    "F20": ("Somebody edits or deletes the slices; another program publishes the same pool", "The pool is restored. A program that keeps changing it is named in the log, the status and `dra doctor`, and is answered ever more slowly."),
    "F21": ("The API server refuses an attribute or a device", "Only that is left out and reported; everything else is published."),
    "F22": ("A claim is deleted by force while it is prepared", "It is released within a minute, with an Event, once nothing uses its devices, or after ten minutes of grace. An API server that answers 404 to everything releases nothing."),
    "F23": ("The same while the driver was down", "The same, after the start."),
    "F24": ("A claim is deleted and made anew under its name", "They are told apart by UID: the new one waits until the old one has let go."),
    "F25": ("A prepare call that arrives after unprepare", "It is refused while no pod of this node has the claim."),
    "F26": ("The scheduler gives a held device to a second claim", "It is refused at once and the holder is named, overlapping partitions included; it succeeds after the release. Monitoring and shares are let in."),
    "F27": ("Two instances at once, in a rolling update", "Both are registered and answer alike; a contested device goes to one claim; one publishes; whoever stays keeps its sockets, and slices do not change."),
    "F28": ("Fifty claims are prepared and fifty unprepared at once", "All end in time; nothing waits for a lock of the whole node."),
    "F29": ("Calls into the NVIDIA driver are slow", "They cost the GPU that they are about; other GPUs' claims are not held up."),
    "F30": ("A call into the NVIDIA driver never returns", "It is left behind: that GPU is tainted, the rest works, and liveness does not have the pod restarted for it."),
    "F31": ("The NVIDIA driver is replaced under the running plugin", "GPUs are kept from new pods while library and module do not fit; the new driver is taken up without a restart."),
    "F32": ("One GPU of eight is lost (XID 79)", "That GPU and all that is cut from it are tainted within seconds, pods and claims are told, the kubelet hears `Unhealthy`; the others are allocated as before. Running pods are evicted only where that was asked for."),
    "F33": ("XIDs that applications cause (13, 31, 43, 45, 68, 109)", "They are counted and shown with effect `None`; nobody is kept away."),
    "F34": ("A thousand XIDs in a second", "At most two writes a second; all are counted, the last state is right, and memory does not grow."),
    "F35": ("A GPU recovers, or comes and goes", "After three good checks the taint goes, without a restart; one that keeps coming back stays tainted longer each time."),
    "F36": ("Uncorrectable memory errors, rows that cannot be remapped", "The GPU is tainted by the table in [health.md](health.md), with what is wrong in the taint, the Event and the message of the health stream."),
    "F37": ("A GPU is added or removed, or MIG is changed by hand", "The next look finds it and the pool follows. A GPU that a claim holds is tainted and not withdrawn."),
    "F38": ("Somebody else's MIG instance is where a partition is to be made", "The error names it, it is left alone, and the retry succeeds once it is gone."),
    "F39": ("A MIG instance cannot be destroyed: it is in use", "The claim stays in `unpreparing` and its place held; it is tried again with pauses that grow, with one Event."),
    "F40": ("MIG mode on Ampere needs a reset of the GPU", "It is never switched while the node runs; the GPU is published as its mode says."),
    "F41": ("An opaque configuration is wrong", "The webhook refuses it; without the webhook prepare refuses it for good and touches nothing. `dra validate`, webhook and prepare say the same."),
    "F42": ("The clock jumps by an hour; the process does not run for a while", "Nothing expires, nothing is freed, no duration is negative: durations come from the monotonic clock. A call that was under way when the machine was paused is not taken for hung."),
    "F43": ("Clients that flood: messages of 64 MB, hundreds of streams, connections that say nothing or a byte now and then", "Each server has limits of size, number and time; the kubelet, scrapers and the API server are served meanwhile; all is given back."),
    "F44": ("The leader is stopped for longer than its lease is good, and wakes", "It sends nothing more: its lead ends by its own clock. What it had sent names the version that it was decided by and is refused once the next leader has written. Of two drivers of a node the one that holds the lock publishes, however long it is stopped; the kernel frees the lock with the process."),
    "F45": ("The webhook does not answer", "Claims without our configuration are made all the same; those with one as the failure policy says. Prepare checks again."),
    "F46": ("Metrics are scraped while a GPU hangs", "The page comes without that GPU's readings, and no threads pile up."),
    "F47": ("Ten thousand cycles of prepare and unprepare", "Memory, threads, descriptors and files are as before, and the last thousand are as quick as the first."),
    "F48": ("A memory limit of 64 MiB", "Eight GPUs cut into fifty-six partitions are published and prepared within it."),
    "F49": ("A device node may not be opened (SELinux, AppArmor)", "`dra doctor` names the node and the reason; where NVML refuses, prepare says so and the driver goes on."),
    "F50": ("A GPU that is to be passed through is in use", "The wait is bounded, who uses it is named, and it stays with the driver that it had."),
}  # fmt: skip


def shown_by() -> dict[str, list[str]]:
    """Give the tests that carry each number: `process/test_life.py::test_…`, in order."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for fault, name in _marked(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(fault, []).append(f"{path.relative_to(TESTS)}::{name}")
    return found


def _marked(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                yield from ((ast.literal_eval(argument), node.name) for argument in mark.args)


def page(made: str) -> str:
    """Give the whole page; `made` says how it is made."""
    lines = ["# Faults\n", made]
    lines.append("What can go wrong on a node and around it, what the driver does then, and the tests that show it, most of them with the\n"
                 "real process, real sockets, a simulated machine and a simulated API server. After each fault the same seven things are\n"
                 "looked at: no device is held twice, records and CDI files go together, no partition is nobody's, the slices are the\n"
                 "machine, the process lives, it holds no more than it needs, and its log names cause and remedy.\n"
                 "`pytest -m fault` runs them all.\n")  # fmt: skip
    lines.append("| | fault | what the driver does |\n|---|---|---|")
    lines += [
        f"| [{number}](#{number.lower()}) | {fault} | {does} |" for number, (fault, does) in FAULTS.items()
    ]
    lines.append("\n## Where it is shown\n")
    shown = shown_by()
    for number in FAULTS:
        lines.append(f"### {number}\n")
        lines += [f"- {_test(each)}" for each in shown.get(number, ())]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _test(name: str) -> str:
    file, _, test = name.partition("::")
    return f"`{file}`: {test.removeprefix('test_').replace('_', ' ')}"
