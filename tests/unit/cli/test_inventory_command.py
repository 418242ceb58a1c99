import json
import subprocess
import sys

import pytest

from dra import __version__
from dra.cli.main import main
from dra.sim.node import SimulatedNode
from dra.slices.validate import validate_slices
from tests.yaml_text import read, read_all


def run(capsys, *words):
    code = main(words)
    out, err = capsys.readouterr()
    return code, out, err


def test_the_table_has_a_line_for_each_gpu(capsys):
    code, out, err = run(capsys, "inventory", "--simulate", "dgx-h100")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "Driver 580.126.20, CUDA 13.0, 8 GPUs"
    assert lines[1].split() == [
        "NAME",
        "PCI",
        "ADDRESS",
        "PRODUCT",
        "MEMORY",
        "ARCHITECTURE",
        "CUDA",
        "MIG",
        "STATE",
    ]
    assert [line.split()[0] for line in lines[2:]] == [f"gpu-{n}" for n in range(8)]
    assert all(line.endswith("ok") and "81559MiB" in line for line in lines[2:])


def test_wide_adds_identity_and_topology(capsys):
    _, out, _ = run(capsys, "inventory", "--simulate", "t4-x1", "-o", "wide")
    assert "GPU-" in out
    assert "pci0000:00" in out


def test_json_and_yaml_hold_the_same(capsys):
    _, as_json, _ = run(capsys, "inventory", "--simulate", "a100-l4", "-o", "json")
    _, as_yaml, _ = run(capsys, "inventory", "--simulate", "a100-l4", "-o", "yaml")
    content = json.loads(as_json)
    assert read(as_yaml) == content
    assert [gpu["name"] for gpu in content["gpus"]] == ["gpu-2", "gpu-0", "gpu-3", "gpu-1"]
    assert {gpu["productName"] for gpu in content["gpus"]} == {"NVIDIA A100-PCIE-40GB", "NVIDIA L4"}


def test_profiles_are_shown_on_request(capsys):
    _, out, _ = run(capsys, "inventory", "--simulate", "a30-x2", "-o", "json", "--profiles")
    profiles = json.loads(out)["gpus"][0]["mig"]["profiles"]
    whole = next(profile for profile in profiles if profile["name"] == "4g.24gb")
    assert whole["placements"] == [{"start": 0, "size": 4}]


def test_slices_are_what_the_driver_would_publish(capsys):
    code, out, _ = run(capsys, "inventory", "--simulate", "dgx-a100", "-o", "slices", "--node-name", "node-7")
    assert code == 0
    (manifest,) = read_all(out)
    assert (manifest["apiVersion"], manifest["kind"]) == ("resource.k8s.io/v1", "ResourceSlice")
    spec = manifest["spec"]
    assert validate_slices([spec]) == []
    assert (spec["driver"], spec["nodeName"], spec["pool"]["name"]) == ("gpu.nvidia.com", "node-7", "node-7")
    assert [device["name"] for device in spec["devices"]] == [f"gpu-{n}" for n in range(8)]
    for device in spec["devices"]:
        assert set(device["attributes"]) == {
            "type", "uuid", "productName", "brand", "architecture", "cudaComputeCapability", "driverVersion",
            "cudaDriverVersion", "addressingMode", "resource.kubernetes.io/pciBusID",
            "resource.kubernetes.io/pcieRoot", "resource.kubernetes.io/numaNode",
        }  # fmt: skip
        assert device["attributes"]["driverVersion"] == {"version": "580.95.5"}
        assert device["capacity"] == {"memory": {"value": "40Gi"}}


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ((), {"gpu": 2, "mig": 50}),
        (("--mig-mode", "static"), {"gpu": 2}),
        (("--mig-mode", "none"), {"gpu": 2}),
        # The gate for counters is off by default before 1.36.
        (("--kubernetes-version", "1.35"), {"gpu": 2}),
    ],
)
def test_slices_have_the_partitions_that_the_plugin_would_offer(capsys, words, kinds):
    code, out, err = run(capsys, "inventory", "--simulate", "h100-nvl-x2", "-o", "slices", *words)
    assert (code, err) == (0, "")
    specs = [manifest["spec"] for manifest in read_all(out)]
    found = [d["attributes"]["type"]["string"] for spec in specs for d in spec.get("devices") or []]
    assert {kind: found.count(kind) for kind in set(found)} == kinds


def test_the_environment_of_the_plugin_says_which_partitions_are_shown(capsys, monkeypatch):
    monkeypatch.setenv("MIG_MODE", "static")
    _, out, _ = run(capsys, "inventory", "--simulate", "h100-nvl-x2", "-o", "slices")
    (manifest,) = read_all(out)
    assert len(manifest["spec"]["devices"]) == 2
    monkeypatch.setenv("MIG_MODE", "sometimes")
    code, out, err = run(capsys, "inventory", "--simulate", "h100-nvl-x2", "-o", "slices")
    assert (code, out) == (2, "")
    assert err.startswith("error: DRA-FLAG-VALUE: MIG_MODE cannot be 'sometimes'")


def test_slices_are_shared_as_the_plugin_would_share_them(capsys):
    code, out, err = run(capsys, "inventory", "--simulate", "t4-x1", "-o", "slices", "--sharing", "4")
    assert (code, err) == (0, "")
    (device,) = read(out)["spec"]["devices"]
    assert device["allowMultipleAllocations"] is True
    assert device["capacity"]["shares"]["value"] == "4"
    assert device["attributes"]["gpudra.dev/sharing"] == {"string": "shares"}
    code, _, err = run(capsys, "inventory", "--simulate", "t4-x1", "--sharing", "half")
    assert code == 2
    assert "DRA-SHARING-KIND" in err


GATE = ["--feature-gates", "PassthroughSupport=true"]


def test_what_can_be_passed_through_is_shown_with_the_gate_only(capsys, monkeypatch):
    def devices(*words):
        main(["inventory", "--simulate", "l40s-x4", "-o", "slices", *words])
        return [
            device["name"]
            for each in read_all(capsys.readouterr().out)
            for device in each["spec"].get("devices") or ()
        ]

    plain = [f"gpu-{number}" for number in range(4)]
    assert devices() == plain
    both = [name for number in range(4) for name in (f"gpu-vfio-{number}", f"gpu-{number}")]
    assert devices(*GATE) == both
    monkeypatch.setenv("FEATURE_GATES", "PassthroughSupport=true")
    assert devices() == both


def test_a_gpu_that_is_passed_through_is_a_line_of_its_own_and_no_trouble(capsys, tmp_path):
    node = SimulatedNode("h100-nvl-x2", tmp_path)
    words = ["inventory", "--simulate", "h100-nvl-x2", "--host-root", str(tmp_path), *GATE]
    node.pci.bind(0, "vfio-pci")
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["gpu-1", "gpu-vfio-0"]
    assert lines[3].endswith("on vfio-pci")
    node.pci.bind(1, "vfio-pci")
    assert main([*words, "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["gpus"] == []
    assert [(each["name"], each["gpu"], each["driver"], each["iommuGroup"]) for each in shown["vfio"]] == [
        ("gpu-vfio-0", None, "vfio-pci", 20),
        ("gpu-vfio-1", None, "vfio-pci", 23),
    ]


def test_a_simulated_machine_leaves_nothing_behind(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run(capsys, "inventory", "--simulate", "dgx-h100")
    assert list(tmp_path.iterdir()) == []


def test_a_node_without_a_driver_says_why_and_what_to_do(capsys, tmp_path):
    (tmp_path / "etc").mkdir()
    code, out, err = run(capsys, "inventory", "--host-root", str(tmp_path), "--driver-root", str(tmp_path))
    assert code == 2
    assert "0 GPUs" in out
    assert err.startswith(
        "problem: DRA-NVML-LIBRARY-NOT-FOUND: libnvidia-ml.so.1 is not under the driver root"
    )
    assert "--nvidia-driver-root" in err


def test_the_driver_root_of_the_plugins_container_is_the_default(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DRIVER_ROOT_CTR_PATH", str(tmp_path / "mounted"))
    _, _, err = run(capsys, "inventory")
    assert f"the driver root {tmp_path / 'mounted'} does not exist" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--simulate", "no-such-machine"),
            "error: DRA-CLI-PROFILE: there is no machine profile 'no-such-machine'",
        ),
        (("--simulate", ""), "error: DRA-CLI-PROFILE"),
        (("--simulate", "t4-x1", "--kubernetes-version", "new"), "error: DRA-CLI-VERSION"),
        (("--simulate", "t4-x1", "--node-name", "Node_A"), "error: DRA-CLI-NODE-NAME: --node-name 'Node_A'"),
        (("--simulate", "t4-x1", "--node-name", ""), "error: DRA-CLI-NODE-NAME"),
        (("--simulate", "t4-x1", "--node-name", "n" * 254), "error: DRA-CLI-NODE-NAME"),
        (("--simulate", "t4-x1", "--driver-name", "Driver"), "error: DRA-CLI-DRIVER-NAME"),
    ],
)
def test_wrong_words_are_an_error_with_a_remedy(capsys, words, says):
    code, out, err = run(capsys, "inventory", *words)
    assert (code, out) == (2, "")
    assert err.startswith(says)
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("kubernetes", "version"),
    [
        ("1.32", "v1beta1"),
        ("v1.32.4-eks-1", "v1beta1"),
        ("1.33", "v1beta2"),
        ("1.34.1", "v1"),
        ("1.37", "v1"),
    ],
)
def test_slices_have_the_newest_version_that_the_server_serves(capsys, kubernetes, version):
    words = ("--simulate", "t4-x1", "-o", "slices", "--kubernetes-version", kubernetes)
    code, out, _ = run(capsys, "inventory", *words)
    assert code == 0
    (manifest,) = read_all(out)
    assert manifest["apiVersion"] == f"resource.k8s.io/{version}"
    (device,) = manifest["spec"]["devices"]
    assert (device["basic"] if version == "v1beta1" else device)["attributes"]["type"] == {"string": "gpu"}
    assert ("basic" in device) == (version == "v1beta1")


@pytest.mark.parametrize("kubernetes", ["1.30", "1.31.9", "1.38", "2.0", "0.1", "1.999999999"])
def test_a_kubernetes_that_is_not_supported_is_refused_with_the_range(capsys, kubernetes):
    words = ("--simulate", "t4-x1", "-o", "slices", "--kubernetes-version", kubernetes)
    code, out, err = run(capsys, "inventory", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: DRA-CLI-VERSION: Kubernetes {kubernetes} is not supported")
    assert "from 1.32 to 1.37" in err


def test_a_host_whose_name_is_no_nodes_name_asks_for_one(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "my_host")
    monkeypatch.delenv("NODE_NAME", raising=False)
    words = ("inventory", "--host-root", str(tmp_path), "--driver-root", str(tmp_path))
    code, out, err = run(capsys, *words, "-o", "slices")
    assert (code, out) == (2, "")
    assert "the name of this host 'my_host'" in err
    assert "--node-name" in err
    # The table does not need it.
    assert "0 GPUs" in run(capsys, *words)[1]


@pytest.mark.parametrize("output", ["table", "json", "slices"])
def test_a_full_disk_under_the_output_is_an_error_and_no_traceback(output):
    words = [sys.executable, "-m", "dra.cli.main", "inventory", "--simulate", "a2-megagpu-16g", "-o", output]
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr.splitlines()[0]
        == "error: DRA-CLI-OUTPUT: cannot write the output: No space left on device"
    )
    assert len(done.stderr.splitlines()) == 2


def test_an_error_of_another_file_is_not_taken_for_one_of_the_output(monkeypatch):
    def fail(_args):
        raise OSError(28, "No space left on device", "/some/file")

    monkeypatch.setattr("dra.cli.inventory.run", fail)
    with pytest.raises(OSError, match="/some/file"):
        main(["inventory"])


def test_something_wrong_with_one_gpu_is_told_by_the_exit_code(capsys, monkeypatch):
    from dra.sim.node import SimulatedNode

    make = SimulatedNode.__init__

    def with_a_lost_gpu(self, *args, **options):
        make(self, *args, **options)
        self.control.lose_gpu(1)

    monkeypatch.setattr(SimulatedNode, "__init__", with_a_lost_gpu)
    code, out, err = run(capsys, "inventory", "--simulate", "l40s-x4")
    assert code == 1
    assert [line.split()[-1] for line in out.splitlines()[2:]].count("ok") == 3
    assert "problem: DRA-NVML-GPU-LOST: GPU 0000:" in err


def test_the_version_and_the_help_need_no_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dra {__version__}\n"
    assert main([]) == 2
    assert "inventory" in capsys.readouterr().out


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["inventry"])
    assert ended.value.code == 2


def test_kubectl_finds_the_same_command(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/kubectl-dra"])
    main([])
    assert capsys.readouterr().out.startswith("usage: kubectl dra")


def test_a_command_imports_only_what_it_needs():
    watch = (
        "import sys; from dra.cli.main import main; main(['inventory', '--simulate', 't4-x1', '-o', 'json']);"
        "print(sorted({name.split('.')[0] for name in sys.modules} & "
        "{'grpc', 'kubernetes', 'pydantic', 'rich', 'yaml', 'google'}), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"


def test_a_reader_that_has_enough_ends_it_quietly():
    command = f"{sys.executable} -m dra.cli.main inventory --simulate a2-megagpu-16g -o json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{", "")
