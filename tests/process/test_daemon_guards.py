"""What the daemon loads and holds: lists and counts that hold on any machine, so that nothing creeps in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.harness import DRIVER, NODE, Node, ref_of, wait_until
from tests.process.invariants import Vitals

# Whoever adds a package here has measured what it costs: `python -m tests.bench --only imports`. grpc asks for its
# tools, which test environments have.
PACKAGES = {
    "dra",
    "grpc",
    "grpc_tools",
    "google",
    "pynvml",
    "structlog",
    "kubernetes",
    "urllib3",
    "certifi",
    "yaml",
}
# Of the interpreter and of compiled modules.
INTERNAL = ("__", "_cython", "cython_runtime", "_distutils_hack", "_sysconfigdata", "_yaml")
# Of the house, what only the command line, the other services and the simulation need.
NOT_OURS = (
    "dra.sim",
    "dra.cel",
    "dra.allocator",
    "dra.diagnose",
    "dra.webhook",
    "dra.fleet",
    "dra.mps",
    "dra.api.rules",
)
# Of Python, what costs much or hints at a second way of doing things. Some of it stays away by stand-ins: `dra.lean`.
NOT_PYTHON = (
    "asyncio",
    "multiprocessing",
    "importlib.metadata",
    "urllib.request",
    "unittest",
    "sqlite3",
    "xml.dom",
    "pydoc",
    "distutils",
    "tkinter",
    "lib2to3",
    "pdb",
    "wsgiref",
    "xmlrpc",
)
# Beside grpc's own and the pools' kept ones: what runs all the time is named in daemon.py.
MOST_THREADS_AT_REST = 28
MOST_DESCRIPTORS_AT_REST = 32


@pytest.fixture(scope="module")
def node():
    made = Node()
    yield made
    made.close()


@pytest.fixture(scope="module")
def loaded(node, tmp_path_factory):
    """The modules of a daemon that has published."""
    root = tmp_path_factory.mktemp("host")
    arguments = [
        f"--node-name={NODE}", f"--host-root={root}", f"--nvidia-driver-root={root}", f"--container-driver-root={root}",
        f"--kubelet-plugins-directory-path={node.root / 'other/plugins'}", f"--cdi-root={root / 'cdi'}",
        f"--kubelet-registrar-directory-path={node.root / 'other/registry'}", f"--kubeconfig={node.kubeconfig}",
    ]  # fmt: skip
    (node.root / "other/registry").mkdir(parents=True)
    boot_id = root / "proc/sys/kernel/random/boot_id"
    boot_id.parent.mkdir(parents=True)
    boot_id.write_text("11111111-2222-4333-8444-555555555555\n")
    script = Path(__file__).parent / "daemon_modules.py"
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ready, modules = json.loads(done.stdout.splitlines()[-1])
    assert ready
    return modules


def test_the_daemon_loads_only_the_packages_of_the_list(loaded):
    tops = {name.partition(".")[0] for name in loaded}
    others = {top for top in tops if not {top, top.lstrip("_")} & sys.stdlib_module_names}
    assert {top for top in others if not top.startswith(INTERNAL)} <= PACKAGES


def test_the_daemon_loads_nothing_of_what_only_others_need(loaded):
    def is_of(name: str, forbidden: tuple[str, ...]) -> bool:
        return name.startswith(tuple(f"{each}." for each in forbidden)) or name in forbidden

    assert [name for name in loaded if is_of(name, NOT_OURS)] == []
    assert [name for name in loaded if is_of(name, NOT_PYTHON)] == []


def test_without_an_endpoint_no_part_of_the_metrics_server_is_loaded(loaded):
    assert not {
        "prometheus_client",
        "dra.telemetry.http",
        "dra.inventory.sampling",
        "dra.nvml.telemetry",
    } & set(loaded)


def test_a_prepare_of_a_whole_gpu_asks_nvml_nothing_and_at_rest_little_is_held(node):
    kubelet = node.kubelet()
    daemon = node.daemon("--inventory-interval=3600")
    connection = kubelet.wait_registered(DRIVER, timeout_seconds=60)
    node.wait_published()
    control = node.machine.control
    ref = ref_of(node.claim("whole", "gpu-3"))
    # What the driver asks at its start, and the health watch by itself, is over or the same before and after.
    asked = []
    for call in (connection.prepare, connection.unprepare):
        before = control.count_calls()
        assert call([ref]).claims[ref.uid].error == ""
        after = control.count_calls()
        asked.append({name for name in after if after[name] != before.get(name, 0)})
    told = ("Mig", "GpuInstance", "ComputeMode", "TimeSlice")
    assert not [name for names in asked for name in names if any(word in name for word in told)]

    def rests() -> bool:
        vitals = Vitals.of(daemon.process.pid)
        return vitals.threads <= MOST_THREADS_AT_REST and vitals.descriptors <= MOST_DESCRIPTORS_AT_REST

    wait_until(rests, seconds=60, what=f"it rests: {Vitals.of(daemon.process.pid)}")
