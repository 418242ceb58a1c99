"""`dra doctor` on a simulated node: each rung is broken in turn, and the ladder ends there with what to do."""

from __future__ import annotations

import json
import socket
import tempfile
from pathlib import Path

import pytest

from dra.api.claim import ClaimRef
from dra.cli.main import main
from dra.diagnose.doctor.context import NodeContext
from dra.diagnose.doctor.ladders import diagnose_node
from dra.diagnose.doctor.model import EXIT_CODES, as_json, as_text
from dra.diagnose.doctor.published_rungs import records_on_disk
from dra.diagnose.explain.cluster import NODE, SLICE, Cluster, Collection
from dra.host.paths import HostPaths
from dra.prepare.record import Record, encode_record
from dra.sim.node import SimulatedNode
from tests.places import SHORT
from tests.unit.diagnose.explain_world import gpu, gpus, slice_of
from tests.unit.diagnose.explain_world import node as node_object

NAME, DRIVER = "node-a", "gpu.nvidia.com"
RUNGS = ["driver", "nvml", "device-nodes", "cdi", "runtime", "kubelet", "slices", "claims", "mps"]
CONTAINERD_1 = {"nodeInfo": {"kubeletVersion": "v1.34.3", "containerRuntimeVersion": "containerd://1.7.27"}}
CONTAINERD_2 = {"nodeInfo": {"kubeletVersion": "v1.36.1", "containerRuntimeVersion": "containerd://2.1.0"}}


class Machine:
    """A simulated node with the traces of a kubelet and of a driver that serves it."""

    def __init__(self, root: Path, **how) -> None:
        self.root = root
        self.sim = SimulatedNode("l40s-x4", root, real_nodes=False, **how)
        self.listeners = []
        for number, _ in enumerate(range(4)):
            for at in (f"195:{number}", "195:254", "195:255", "510:0", "510:1"):
                link = root / "dev/char" / at
                link.parent.mkdir(parents=True, exist_ok=True)
                link.is_symlink() or link.symlink_to("../null")
        self.write("/etc/containerd/config.toml", "version = 3\n")
        self.listen(root / "var/lib/kubelet/plugins_registry" / f"{DRIVER}-reg.sock")

    def write(self, path, text):
        at = self.root / path.lstrip("/")
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)
        return at

    def listen(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        self.listeners.append(listener)
        return path

    def context(self, *, status=CONTAINERD_2, slices=True, allocatable=None):
        collection = Collection()
        collection.add(node_object(NAME, status=status, allocatable=allocatable))
        if slices is not False:
            collection.add(gpus(NAME, 4) if slices is True else slices)
        cluster = Cluster(collection.objects)
        return NodeContext(
            HostPaths(**self.sim.paths_kwargs()), NAME, library=self.sim.library, cluster=cluster
        )

    def diagnose(self, **how):
        return diagnose_node(self.context(**how))

    def close(self):
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def machine():
    with tempfile.TemporaryDirectory(prefix="doc", dir=SHORT) as place:
        made = Machine(Path(place))
        yield made
        made.close()


def codes(report, severity=None):
    return [f.code for rung in report.rungs for f in rung.findings if severity in (None, f.severity)]


def broken_at(report, rung, code):
    """The ladder ended at this rung for this reason, named a remedy, and looked at nothing above."""
    assert report.broken is not None and report.broken.name == rung, as_text(report)
    assert report.exit_code == EXIT_CODES[rung]
    (found,) = [f for f in report.broken.findings if f.severity == "error" and f.code == code][:1] or [None]
    assert found is not None, as_text(report)
    assert found.remedy
    above = report.rungs[[r.name for r in report.rungs].index(rung) + 1 :]
    assert {r.state for r in above} <= {"not-reached"}
    return found


def test_a_whole_node_is_all_well(machine):
    report = machine.diagnose()
    assert [rung.name for rung in report.rungs] == RUNGS
    assert [rung.state for rung in report.rungs] == ["ok"] * len(RUNGS), as_text(report)
    assert report.exit_code == 0
    assert "4 of 4 GPUs usable" in as_text(report)
    assert json.loads(json.dumps(as_json(report)))["brokenRung"] is None


def test_exit_codes_are_distinct():
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert not set(EXIT_CODES.values()) & {0, 1, 2, 3, 130}


# -- driver and NVML


def test_no_module_is_the_driver_rung(machine):
    machine.sim.control.unload_driver(force=True)
    assert "modprobe nvidia" in broken_at(machine.diagnose(), "driver", "DRA-DRIVER-NOT-LOADED").remedy


def test_a_gpu_that_nouveau_holds_is_named(machine):
    machine.sim.control.unload_driver(force=True)
    for device in (machine.root / "sys/bus/pci/devices").iterdir():
        if (device / "class").exists() and (device / "class").read_text().startswith("0x03"):
            (machine.root / "sys/bus/pci/drivers/nouveau").mkdir(parents=True, exist_ok=True)
            (device / "driver").symlink_to(machine.root / "sys/bus/pci/drivers/nouveau")
    assert "nouveau" in broken_at(machine.diagnose(), "driver", "DRA-DRIVER-NOT-LOADED").message


def test_no_library_is_the_driver_rung(machine):
    machine.sim.control.remove_library()
    broken_at(machine.diagnose(), "driver", "DRA-NVML-LIBRARY-NOT-FOUND")


def test_a_driver_in_another_usual_root_is_told_with_the_root_to_set():
    with tempfile.TemporaryDirectory(prefix="doc", dir=SHORT) as place:
        sim = SimulatedNode("l40s-x4", Path(place), layout="operator", real_nodes=False)
        wrong = HostPaths(**(sim.paths_kwargs() | {"driver_root_host": "/"}))
        report = diagnose_node(NodeContext(wrong, NAME, library=sim.library))
        assert "/run/nvidia/driver" in broken_at(report, "driver", "DRA-DRIVER-ROOT-WRONG").remedy


def test_libraries_of_another_version_than_the_module_are_the_driver_rung(machine):
    machine.sim.control.upgrade_driver("999.1.2", module=False)
    found = broken_at(machine.diagnose(), "driver", "DRA-DRIVER-VERSION-MISMATCH")
    assert "999.1.2" in found.message and "reboot" in found.remedy


def test_a_library_that_containers_will_miss_is_a_warning(machine):
    for path in machine.root.rglob("libcuda.so*"):
        path.unlink()
    report = machine.diagnose()
    assert report.exit_code == 3
    assert codes(report, "warning") == ["DRA-DRIVER-LIBRARIES-MISSING"]


def test_a_node_without_gpus_says_so():
    with tempfile.TemporaryDirectory(prefix="doc", dir=SHORT) as place:
        (Path(place) / "proc").mkdir()
        report = diagnose_node(NodeContext(HostPaths(host_root=Path(place)), NAME))
        broken_at(report, "driver", "DRA-NO-GPU")


def test_nvml_that_fails_is_its_own_rung(machine):
    machine.sim.control.set_fault("nvmlInitWithFlags", error="UNKNOWN")
    assert machine.diagnose().broken.name == "nvml"


def test_a_lost_gpu_is_a_warning_that_names_it(machine):
    machine.sim.control.lose_gpu(2)
    report = machine.diagnose()
    assert report.rungs[1].state == "warning" and "3 of 4 GPUs usable" in report.rungs[1].text
    assert report.exit_code == 3


def test_gpus_without_persistence_mode_are_told(machine):
    machine.sim.control.set_gpu(1, persistence=False)
    report = machine.diagnose()
    assert codes(report) == ["DRA-NVML-PERSISTENCE-OFF"] and report.exit_code == 0
    assert "gpu-1" in as_text(report)


# -- device nodes


def test_a_node_with_stale_numbers_is_the_device_nodes_rung(machine):
    machine.write("/dev/nvidia-uvm", "simulated-device c 511 0 gid 0\n")
    found = broken_at(machine.diagnose(), "device-nodes", "DRA-DEVICE-NODE-STALE")
    assert "511:0" in found.message and "510:0" in found.message


def test_a_missing_node_whose_module_is_not_loaded(machine):
    (machine.root / "dev/nvidia-uvm").unlink()
    devices = machine.root / "proc/devices"
    devices.write_text("".join(line + "\n" for line in devices.read_text().splitlines() if "uvm" not in line))
    assert (
        "modprobe nvidia-uvm"
        in broken_at(machine.diagnose(), "device-nodes", "DRA-DEVICE-NODE-MISSING").remedy
    )


def test_a_missing_node_that_the_plugin_can_make_and_missing_links_are_warnings(machine):
    (machine.root / "dev/nvidia1").unlink()
    (machine.root / "dev/char/195:0").unlink()
    report = machine.diagnose()
    assert codes(report, "warning") == ["DRA-DEVICE-NODE-MISSING", "DRA-DEV-CHAR-LINKS"]


@pytest.mark.fault("F49")
def test_a_denied_node_is_reported(machine, monkeypatch):
    import os

    real = os.open

    def denied(path, *args, **kwargs):
        if str(path).endswith("/dev/nvidia3"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr("dra.diagnose.doctor.driver_rungs.os.open", denied)
    assert "SELinux" in broken_at(machine.diagnose(), "device-nodes", "DRA-DEVICE-NODE-DENIED").remedy


# -- CDI


def spec(kind, name, **edits):
    devices = [{"name": name, "containerEdits": edits}]
    return json.dumps({"cdiVersion": "0.5.0", "kind": kind, "devices": devices})


@pytest.mark.fault("F11")
def test_what_is_wrong_in_the_cdi_directories_is_said_file_by_file(machine):
    uvm = {"path": "/dev/nvidia-uvm", "major": 507, "minor": 0}
    machine.write("/etc/cdi/nvidia.yaml", spec("nvidia.com/gpu", "0", deviceNodes=[uvm]))
    machine.write("/var/run/cdi/copy.yaml", spec("nvidia.com/gpu", "0"))
    machine.write("/etc/cdi/broken.json", "{")
    gone = {"hostPath": "/usr/bin/nvidia-gone", "containerPath": "/usr/bin/x"}
    machine.write("/etc/cdi/dangling.yaml", "cdiVersion: 0.5.0\nkind: example.com/a\ndevices: []\n"
                  f"containerEdits: {{mounts: [{json.dumps(gone)}]}}\n")  # fmt: skip
    report = machine.diagnose()
    assert sorted(codes(report, "warning")) == [
        "DRA-CDI-DANGLING", "DRA-CDI-DEVICE-TWICE", "DRA-CDI-SPEC-UNREADABLE", "DRA-CDI-STALE-MAJOR",
    ]  # fmt: skip
    text = as_text(report)
    assert "/etc/cdi/nvidia.yaml gives /dev/nvidia-uvm the major 507, the loaded module has 510" in text
    assert "/usr/bin/nvidia-gone" in text
    assert report.exit_code == 3


# -- runtime


@pytest.mark.parametrize(
    ("version", "files", "code"),
    [
        ("containerd://1.7.27", {}, "DRA-RUNTIME-CDI-OFF"),
        ("containerd://1.6.9", {}, "DRA-RUNTIME-NO-CDI"),
        ("containerd://2.1.0", {"/etc/containerd/config.toml": 'version = 3\n[plugins."io.containerd.cri.v1.runtime"]\nenable_cdi = false\n'}, "DRA-RUNTIME-CDI-OFF"),
        ("containerd://2.1.0", {"/etc/containerd/config.toml": 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = false\n'}, "DRA-RUNTIME-CDI-OFF"),
        ("containerd://2.1.0", {"/etc/containerd/config.toml": 'version = 3\n[plugins."io.containerd.cri.v1.runtime"]\ncdi_spec_dirs = ["/etc/cdi"]\n'}, "DRA-RUNTIME-CDI-DIRS"),
        ("cri-o://1.34.0", {"/etc/crio/crio.conf.d/10-x.conf": '[crio.runtime]\ncdi_spec_dirs = ["/etc/cdi"]\n'}, "DRA-RUNTIME-CDI-DIRS"),
        ("docker://27.0.0", {}, "DRA-RUNTIME-UNSUPPORTED"),
    ],
)  # fmt: skip
def test_a_runtime_that_would_not_inject_is_the_runtime_rung(machine, version, files, code):
    machine.write("/etc/containerd/config.toml", "version = 2\n")
    for path, text in files.items():
        machine.write(path, text)
    status = {"nodeInfo": {"kubeletVersion": "v1.36.0", "containerRuntimeVersion": version}}
    broken_at(machine.diagnose(status=status), "runtime", code)


@pytest.mark.parametrize(
    ("version", "files"),
    [
        ("containerd://1.7.27", {"/etc/containerd/config.toml": 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n'}),
        ("containerd://1.7.27", {"/etc/containerd/config.toml": 'version = 2\nimports = ["conf.d/*.toml"]\n',
                                 "/etc/containerd/conf.d/cdi.toml": '[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\ncdi_spec_dirs = ["/run/cdi"]\n'}),
        ("containerd://1.7.27-k3s1", {"/var/lib/rancher/k3s/agent/etc/containerd/config.toml": 'version = 2\n[plugins."io.containerd.grpc.v1.cri"]\nenable_cdi = true\n'}),
        ("containerd://2.3.0", {}),
        ("cri-o://1.34.0", {"/etc/crio/crio.conf": '[crio.runtime]\ncdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]\n'}),
    ],
)  # fmt: skip
def test_a_runtime_that_injects_is_well(machine, version, files):
    for path, text in files.items():
        machine.write(path, text)
    status = {"nodeInfo": {"kubeletVersion": "v1.36.0", "containerRuntimeVersion": version}}
    report = machine.diagnose(status=status)
    assert report.rungs[4].state == "ok", as_text(report)


def test_without_the_api_the_files_alone_tell_of_the_runtime(machine):
    machine.write("/etc/containerd/config.toml", "version = 2\n")
    ctx = machine.context()
    ctx.cluster = None
    report = diagnose_node(ctx)
    assert codes(report) == ["DRA-RUNTIME-CDI-UNSURE"]
    assert [rung.state for rung in report.rungs][-3:] == ["unknown", "ok", "ok"]


# -- kubelet


@pytest.mark.parametrize("version", ["v1.34.0", "v1.34.1-gke.200"])
def test_kubelets_that_lose_drivers_are_named(machine, version):
    status = {"nodeInfo": {"kubeletVersion": version, "containerRuntimeVersion": "containerd://2.1.0"}}
    report = machine.diagnose(status=status)
    assert codes(report, "warning") == ["DRA-KUBELET-1340"] and "1.34.2" in as_text(report)


def test_no_driver_at_the_registry_and_a_dead_socket(machine):
    machine.close()
    found = broken_at(machine.diagnose(), "kubelet", "DRA-DRIVER-NOT-REGISTERED")
    assert f"nobody answers on {DRIVER}-reg.sock" in found.message


@pytest.mark.parametrize(
    ("version", "config", "code"),
    [
        ("v1.34.3", "featureGates: {DynamicResourceAllocation: false}\n", "DRA-KUBELET-GATE"),
        ("v1.33.2", "kind: KubeletConfiguration\n", "DRA-KUBELET-GATE"),
        ("v1.31.0", "", "DRA-KUBELET-TOO-OLD"),
    ],
)
def test_a_kubelet_without_dra_is_the_kubelet_rung(machine, version, config, code):
    machine.write("/var/lib/kubelet/config.yaml", config)
    status = {"nodeInfo": {"kubeletVersion": version, "containerRuntimeVersion": "containerd://2.1.0"}}
    broken_at(machine.diagnose(status=status), "kubelet", code)


def test_another_root_directory_of_the_kubelet(machine):
    machine.write("/proc/42/comm", "kubelet\n")
    machine.write("/proc/42/cmdline", "kubelet\0--root-dir=/data/kubelet\0")
    assert (
        "/data/kubelet/plugins_registry"
        in broken_at(machine.diagnose(), "kubelet", "DRA-KUBELET-ROOT").remedy
    )


def test_an_active_device_plugin_is_a_warning_and_a_left_over_zero_is_none(machine):
    assert machine.diagnose(allocatable={"nvidia.com/gpu": "0"}).exit_code == 0
    report = machine.diagnose(allocatable={"nvidia.com/gpu": "4", "nvidia.com/mig-1g.5gb": "7"})
    assert codes(report, "warning") == ["DRA-DEVICE-PLUGIN-ACTIVE"]
    assert "nvidia.com/gpu: 4, nvidia.com/mig-1g.5gb: 7" in as_text(report)
    machine.listen(machine.root / "var/lib/kubelet/device-plugins/nvidia-gpu.sock")
    assert codes(machine.diagnose(), "warning") == ["DRA-DEVICE-PLUGIN-ACTIVE"]


# -- slices and claims


def test_a_node_that_published_nothing_or_half_a_pool(machine):
    broken_at(machine.diagnose(slices=False), "slices", "DRA-SLICES-MISSING")
    broken_at(machine.diagnose(slices=slice_of(NAME, [gpu(0)], count=2)), "slices", "DRA-POOL-INCOMPLETE")


def test_tainted_devices_are_told(machine):
    item = gpus(NAME, 4)
    item["spec"]["devices"][1]["taints"] = [
        {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}
    ]
    report = machine.diagnose(slices=item)
    assert f"gpu-1 of node {NAME} is tainted gpu.nvidia.com/xid=79:NoSchedule" in as_text(report)
    assert report.exit_code == 3


def test_a_checkpoint_of_nvidias_driver_that_nobody_took_over(machine):
    machine.write(f"/var/lib/kubelet/plugins/{DRIVER}/checkpoint.json", "{}")
    assert codes(machine.diagnose(), "warning") == ["DRA-CHECKPOINT-FOREIGN"]


# -- the command


def test_the_command_climbs_offline_and_its_exit_code_is_the_rung(machine, capsys):
    machine.sim.control.unload_driver(force=True)
    words = ["doctor", "--simulate", "l40s-x4", "--host-root", str(machine.root), "--offline", "-o", "json"]
    assert main(words) == EXIT_CODES["driver"]
    found = json.loads(capsys.readouterr().out)
    assert found["brokenRung"] == "driver" and found["exitCode"] == EXIT_CODES["driver"]
    assert found["rungs"][0]["findings"][0]["code"] == "DRA-DRIVER-NOT-LOADED"


def test_the_command_reads_dumps_in_place_of_an_api_server(tmp_path, capsys):
    (tmp_path / "all.json").write_text(
        json.dumps(node_object(NAME, status=CONTAINERD_1)) + json.dumps(gpus(NAME, 2))
    )
    assert main(["doctor", f"node/{NAME}", "-f", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "containerd://1.7.27" in out and "2 devices (2 whole GPUs)" in out
    assert main(["doctor", "cluster", "-f", str(tmp_path)]) == 0
    assert main(["doctor", "pod/x"]) == 2


def test_the_doctor_changes_nothing(machine):
    def snapshot():
        return {
            str(path): (path.lstat().st_mtime_ns, path.lstat().st_size)
            for path in machine.root.rglob("*")
            if "sim" not in path.parts[len(machine.root.parts)].lower()
        }

    machine.write(f"/var/lib/kubelet/plugins/{DRIVER}/claims/u.json", "broken")
    before = snapshot()
    assert "DRA-RECORD-CORRUPT" in codes(machine.diagnose())
    assert snapshot() == before
    assert Cluster({SLICE: {}, NODE: {}}).knows(NODE)


def test_what_was_set_aside_is_told_until_the_record_is_rebuilt(machine):
    uid = "0b1ee1d4-53b1-4b55-9c36-3f2b8a5f0c11"
    claims = f"/var/lib/kubelet/plugins/{DRIVER}/claims/{uid}.json"
    machine.write(f"{claims}.corrupt-1", "broken")
    assert "DRA-RECORD-CORRUPT" in codes(machine.diagnose())
    record = Record(ClaimRef("a", "c", uid), "prepared", "boot", ())
    machine.write(claims, encode_record(record).decode())
    report = machine.diagnose()
    assert "DRA-RECORD-CORRUPT" not in codes(report)
    assert [each.uid for each in records_on_disk(machine.context())] == [uid]
    machine.write(claims, "broken again")
    assert "DRA-RECORD-CORRUPT" in codes(machine.diagnose())
