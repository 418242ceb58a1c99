"""`dra sim up`, `status`, `fault` and `down`, as a user types them; a cluster of processes and in-process nodes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dra.cli.main import main
from dra.errors import DraError
from dra.kube.client import connect
from dra.kube.connection import KubeOptions
from dra.kube.resources import NAMESPACES, PODS, RESOURCE_CLAIM_TEMPLATES, RESOURCE_SLICES
from dra.sim.apiserver.exchange import Request
from dra.sim.cluster import SimCluster
from dra.sim.cluster_node import ClusterNode
from dra.sim.in_process import SharedMachine
from dra.sim.run_file import RunFile, process_start, read_run_file
from dra.sim.up import UpSettings, run_down, run_up
from dra.slices.features import NEWEST
from dra.slices.pool import build_pool
from tests.places import SHORT
from tests.yaml_text import read_all

ROOT = Path(__file__).parents[2]
DRIVER = "gpu.nvidia.com"


@pytest.fixture
def root():
    """A short path: sockets."""
    made = Path(tempfile.mkdtemp(prefix="dsu", dir=SHORT))
    yield made / "c"
    run_down(made / "c")
    shutil.rmtree(made, ignore_errors=True)


def sim(*words, root):
    return main(["sim", words[0], "--root", str(root), *words[1:]])


def up(root, *words):
    os.chdir(ROOT)
    return sim("up", "--detach", *words, root=root)


def status(root, capsys):
    capsys.readouterr()
    code = sim("status", "-o", "json", root=root)
    return code, json.loads(capsys.readouterr().out)


def until(condition, what, seconds=60.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited for {what}"
        time.sleep(0.05)
    return value


def lives(pid):
    return bool(process_start(pid))


def test_up_status_fault_down(root, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert up(root, "--nodes", "t4-x1,l40s-x4,t4-x1", "--real", "1") == 0
    assert capsys.readouterr().out == f"export KUBECONFIG={root / 'kubeconfig'}\n"
    code, found = status(root, capsys)
    assert code == 0
    rows = [(n["name"], n["driver"], n["registered"], n["devices"], n["pods"]) for n in found["nodes"]]
    assert rows == [
        ("t4-x1-0", "running", True, 1, 0),
        ("l40s-x4-0", "in-process", None, 4, 0),
        ("t4-x1-1", "in-process", None, 1, 0),
    ]
    assert found["faults"] == []
    # A second one does not start here, and does not disturb the first.
    assert main(["sim", "up", "--root", str(root)]) == 2
    assert f"as process {found['pid']}" in capsys.readouterr().err
    # Faults of a node: on, listed, in the table, cleared.
    assert sim("fault", "t4-x1-0", "gpu-lost", "--gpu", "0", root=root) == 0
    assert sim("fault", "t4-x1-0", "xid", "--gpu", "0", "--xid", "95", root=root) == 0
    assert sim("fault", "t4-x1-0", "gpu-set", "--gpu", "0", "--set", "temperature=91", root=root) == 0
    assert sim("fault", "t4-x1-0", "ecc", "--gpu", "0", root=root) == 0
    assert sim("fault", "t4-x1-0", "gpu-set", "--gpu", "0", "--set", "warmth=1", root=root) == 2
    assert sim("fault", "t4-x1-0", "plugin-stop", root=root) == 0
    assert sim("fault", "api", "throttle", "--path", "/resourceslices", root=root) == 0
    capsys.readouterr()
    sim("fault", root=root)
    listed = capsys.readouterr().out
    assert "t4-x1-0 gpu-lost gpu 0" in listed and "api throttle * /resourceslices 429" in listed
    code, found = status(root, capsys)
    assert code == 3
    assert found["nodes"][0]["driver"] == "stopped" and "plugin-stop" in found["nodes"][0]["faults"]
    assert sim("status", root=root) == 3
    table = capsys.readouterr().out
    assert "t4-x1-0" in table and "stopped" in table and "fault: api throttle" in table
    sim("fault", "--clear", root=root)
    told = capsys.readouterr().out
    assert "cleared t4-x1-0: gpu-lost" in told and "cleared api: throttle" in told
    until(lambda: status(root, capsys)[0] == 0, "all to be well again")
    # The end: of the process, of its driver, and of its files. Twice does no harm.
    pids = [found["pid"], *(n["pid"] for n in status(root, capsys)[1]["nodes"] if n["pid"])]
    assert sim("down", root=root) == 0
    assert not any(lives(pid) for pid in pids)
    assert not root.exists()
    assert sim("down", root=root) == 0
    assert "no cluster ran" in capsys.readouterr().err


def test_no_driver_outlives_a_cluster_that_was_killed_and_its_remains_are_known_as_such(
    root, capsys, monkeypatch
):
    monkeypatch.chdir(ROOT)
    up(root, "--nodes", "t4-x1x2")
    found = read_run_file(root)
    assert len(found.drivers) == 2 and all(lives(pid) for pid in found.drivers.values())
    os.kill(found.pid, signal.SIGKILL)
    until(lambda: not lives(found.pid), "the cluster to be gone", 5)
    until(lambda: not any(lives(pid) for pid in found.drivers.values()), "the drivers to be gone", 5)
    capsys.readouterr()
    assert sim("status", root=root) == 1
    assert "ended without cleaning up" in capsys.readouterr().err
    # The next one starts over the remains.
    assert up(root, "--nodes", "t4-x1") == 0
    code, status_now = status(root, capsys)
    assert code == 0 and [node["name"] for node in status_now["nodes"]] == ["t4-x1-0"]


def test_a_pid_that_somebody_else_got_is_left_alone(root, capsys):
    """The run file's process is told from another with its pid by the start time."""
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        root.mkdir()
        boot, _, _ = process_start(other.pid).partition("/")
        RunFile(other.pid, f"{boot}/1", ready=True).write(root)
        assert not read_run_file(root).alive
        assert sim("status", root=root) == 1
        assert sim("down", root=root) == 0
        assert other.poll() is None
        assert not root.exists()
    finally:
        other.kill()
        other.wait()


def test_down_touches_nothing_that_no_cluster_made(root):
    (root / "n7").mkdir(parents=True)
    (root / "n7" / "thesis.txt").write_text("precious")
    RunFile(1, "long ago").write(root)
    run_down(root)
    assert (root / "n7" / "thesis.txt").read_text() == "precious"
    assert not (root / "run.json").exists()


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing(root, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    # The log of the detached process says it; the port is taken.
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert up(root, "--port", str(taken.getsockname()[1])) == 1
    said = capsys.readouterr().err
    assert "DRA-SIM-PORT" in said and "Address already in use" in said
    assert "Traceback" not in said
    run_down(root)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_foreground_cluster_ends_with_a_signal_and_cleans_up(root, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "dra.cli.main", "sim", "up", "--nodes", "t4-x1", "--real", "0", "--root", str(root)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == f"export KUBECONFIG={root / 'kubeconfig'}\n"
        process.send_signal(number)
        assert process.wait(15) == 0
        assert not root.exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.stdout.close()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("nowhere", "xid"), "there is no node 'nowhere'"),
        (("t4-x1-0", "xid"), "has no switches"),
        (("api", "earthquake"), "the API server has no fault 'earthquake'"),
        (("t4-x1-0",), "which fault of t4-x1-0?"),
    ],
)
def test_a_fault_that_is_not_there_is_refused_with_what_there_is(shared, capsys, words, text):
    assert sim("fault", *words, root=shared) == 2
    assert text in capsys.readouterr().err


@pytest.fixture(scope="module")
def shared():
    """One cluster without driver processes for tests that only ask."""
    made = Path(tempfile.mkdtemp(prefix="dss", dir=SHORT)) / "c"
    before = Path.cwd()
    up(made, "--nodes", "t4-x1", "--real", "0")
    os.chdir(before)
    yield made
    run_down(made)
    shutil.rmtree(made.parent, ignore_errors=True)


# -- in this process ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("delay", "--seconds", "-5"), "--seconds -5.0 is no time"),
        (("delay", "--seconds", "nan"), "--seconds nan is no time"),
        (("error", "--code", "42"), "--code 42 is no status of a failure"),
        (("throttle", "--times", "0"), "--times 0 hits no request"),
        (("freeze", "--path", "("), "--path '(' is no regular expression"),
    ],
)
def test_a_fault_of_the_api_that_the_server_could_not_do_is_refused(shared, capsys, words, why):
    capsys.readouterr()
    assert sim("fault", "api", *words, root=shared) == 2
    assert why in capsys.readouterr().err
    assert sim("fault", root=shared) == 0
    assert capsys.readouterr().out == "faults: none\n"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--version", "1.99"), "DRA-SIM-VERSION"),
        (("--version", "1.36.2"), "DRA-SIM-VERSION"),
        (("--nodes", "dgx-h100x0"), "DRA-SIM-NODES"),
    ],
)
def test_what_up_cannot_do_is_said_in_one_error_with_its_remedy(root, capsys, monkeypatch, words, why):
    monkeypatch.chdir(ROOT)
    assert up(root, *words) != 0
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"error: {why}: ")
    assert second.startswith("  ")
    assert not (root / "run.json").exists()


@pytest.mark.parametrize("words", [("--port", "-1"), ("--port", "65536"), ("--port", "x"), ("--real", "-1")])
def test_numbers_out_of_range_are_usage_errors(root, words):
    with pytest.raises(SystemExit, match="2"):
        up(root, *words)


def test_a_file_in_place_of_the_directory_is_an_error_that_names_it(tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    assert up(file) != 0
    assert f"DRA-SIM-ROOT: {file} cannot be the cluster's directory" in capsys.readouterr().err


def test_a_cluster_whose_run_file_is_damaged_is_known_by_its_lock_and_ended(root, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert up(root, "--nodes", "t4-x1", "--real", "0") == 0
    found = read_run_file(root)
    assert found is not None
    (root / "run.json").write_text("{bad")
    assert sim("status", root=root) != 0
    assert f"DRA-SIM-RUN-FILE: a cluster runs in {root} as process {found.pid}" in capsys.readouterr().err
    assert sim("down", root=root) == 0
    until(lambda: not lives(found.pid), "the cluster to end")
    assert not root.exists()


def test_a_disk_that_is_full_is_said_and_nothing_stays(root, capsys, monkeypatch):
    def full(*_args, **_more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dra.sim.up.SimCluster", full)
    settings = UpSettings(root=root, nodes=[("t4-x1-0", "t4-x1")])
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(DraError, match="No space left on device") as refused:
            run_up(settings, print)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    assert refused.value.code == "DRA-SIM-FILES"
    assert not root.exists()


def test_in_process_nodes_publish_what_a_driver_process_publishes(tmp_path):
    with tempfile.TemporaryDirectory(prefix="dsc", dir=SHORT, ignore_cleanup_errors=True) as place:
        with SimCluster(Path(place), [("node-a", "l40s-x4"), ("node-b", "l40s-x4")], real=1) as cluster:
            cluster.wait_ready()
            published = {item["spec"]["nodeName"]: item["spec"] for item in cluster.slices()}
            machine = SharedMachine.make("l40s-x4", tmp_path, driver=DRIVER)
            pool = build_pool(machine.inventory_of("node-a"), node_name="node-a", features=NEWEST)
            assert published["node-a"]["devices"] == list(pool.devices)
            assert published["node-b"].keys() == published["node-a"].keys()


def test_a_restarted_kubelet_finds_the_driver_and_its_pods_again():
    with tempfile.TemporaryDirectory(prefix="dsc", dir=SHORT, ignore_cleanup_errors=True) as place:
        with SimCluster(Path(place), [("node-a", "t4-x1")]) as cluster:
            cluster.wait_ready()
            cluster.apply(ROOT / "deploy/manifests/deviceclasses.yaml", ROOT / "examples/selectors.yaml")
            cluster.apply(ROOT / "examples/extended-resource.yaml")

            def phase():
                return [
                    p["status"].get("phase") for p in cluster.pods() if p["metadata"]["name"] == "classic"
                ]

            cluster.until(lambda: phase() == ["Running"], "the pod to run")
            node = cluster.nodes["node-a"]
            before = node.kubelet
            node.restart_kubelet()
            cluster.wait_ready()
            assert node.kubelet is not before and node.registered
            running = cluster.until(node.kubelet.pods.all, "the pod to be known again")
            assert [pod.pod["metadata"]["name"] for pod in running] == ["classic"]
            assert phase() == ["Running"]
            # A T4 is no Hopper: the other example waits and says so.
            pod = next(pod for pod in cluster.pods() if pod["metadata"]["name"] == "chooser")
            assert "0/1 nodes are available" in pod["status"]["conditions"][0]["message"]


def test_what_a_container_printed_is_its_log_also_after_the_pod_has_ended(root):
    container = {
        "name": "main",
        "image": "i",
        "command": ["nvidia-smi", "-L"],
        "resources": {"claims": [{"name": "gpu"}]},
    }
    without = {"name": "other", "image": "i", "command": ["nvidia-smi"]}
    request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER}}
    pods = "/api/v1/namespaces/default/pods"
    with SimCluster(root, [("node-a", "t4-x1")], real=0) as cluster:
        cluster.apply(ROOT / "deploy/manifests/deviceclasses.yaml")
        cluster.api.create(
            "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims",
            {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "one"},
             "spec": {"devices": {"requests": [request]}}},
        )  # fmt: skip
        spec = {
            "restartPolicy": "Never",
            "containers": [container, without],
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "one"}],
        }
        cluster.api.create(pods, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": spec})
        cluster.until(
            lambda: cluster.pods()[0]["status"].get("phase") == "Failed", "the pod to end", timeout_seconds=60
        )

        def log(query):
            answer = cluster.api.api.handle(Request("GET", f"{pods}/p/log?{query}", {"accept": "*/*"}))
            return answer.status, answer.body.decode()

        assert log("container=main") == (200, "GPU 0: /dev/nvidia0\n")
        assert log("container=other&tailLines=1") == (200, "nvidia-smi: command not found\n")
        assert log("container=main&tailLines=0") == (200, "")
        status, text = log("")
        assert status == 400
        assert "a container name must be specified for pod p, choose one of: [main other]" in text
        status, text = log("container=no")
        assert (status, "container no is not valid for pod p" in text) == (400, True)
        answer = cluster.api.api.handle(Request("POST", f"{pods}/p/exec?command=ls", {"accept": "*/*"}))
        assert (answer.status, b"pods/exec is not simulated" in answer.body) == (501, True)


@pytest.mark.parametrize("last", ["start_kubelet", "start_driver"])
def test_a_start_that_is_interrupted_leaves_no_driver(root, monkeypatch, last):
    begun = []
    whole = getattr(ClusterNode, last)

    def interrupted(node):
        if last == "start_driver":
            whole(node)
            begun.append(node.process)
        raise KeyboardInterrupt

    monkeypatch.setattr(ClusterNode, last, interrupted)
    with pytest.raises(KeyboardInterrupt), SimCluster(root, [("t4-x1-0", "t4-x1")]):
        pass
    assert all(process.returncode is not None for process in begun)


def test_with_the_gate_of_the_drivers_a_pod_gets_a_gpu_passed_through_and_gives_it_back(
    root, capsys, monkeypatch
):
    """The class is there; faults keep a GPU from it, and are taken back."""
    monkeypatch.chdir(ROOT)
    assert up(root, "--nodes", "t4-x1", "--feature-gates", "PassthroughSupport=true") == 0
    assert sim("fault", "t4-x1-0", "gpu-held", "--gpu", "0", root=root) == 0
    assert sim("fault", "t4-x1-0", "iommu-off", root=root) == 0
    capsys.readouterr()
    sim("fault", root=root)
    listed = capsys.readouterr().out
    assert "t4-x1-0 gpu-held gpu 0" in listed and "t4-x1-0 iommu-off" in listed
    sim("fault", "--clear", root=root)
    assert "cleared t4-x1-0: gpu-held" in capsys.readouterr().out
    sim("fault", root=root)
    assert "none" in capsys.readouterr().out
    client = connect(KubeOptions(kubeconfig=str(root / "kubeconfig")))

    def devices():
        return [
            device["name"] for each in client.list(RESOURCE_SLICES).items for device in each["spec"].get("devices") or ()
        ]  # fmt: skip

    try:
        until(lambda: devices() == ["gpu-vfio-0", "gpu-0"], "the pool")
        for manifest in read_all((ROOT / "examples/vfio.yaml").read_text()):
            kind = {"Namespace": NAMESPACES, "ResourceClaimTemplate": RESOURCE_CLAIM_TEMPLATES, "Pod": PODS}[
                manifest["kind"]
            ]
            client.create(kind, manifest, namespace=manifest["metadata"].get("namespace"))
        (pod,) = client.list(PODS).items
        name = pod["metadata"]["name"]
        until(lambda: client.get(PODS, name, "vfio")["status"].get("phase") == "Running", "the pod to run")
        until(lambda: devices() == ["gpu-vfio-0"], "the GPU to be offered as nothing else")
        client.delete(PODS, name, "vfio")
        until(lambda: devices() == ["gpu-vfio-0", "gpu-0"], "the GPU to be back")
    finally:
        client.close()
