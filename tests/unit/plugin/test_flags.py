"""The flags of `dra plugin`: NVIDIA's all parse, ours are checked, and nonsense is refused by name."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from dra.cli.plugin import add_arguments, add_parser, settings_from
from dra.cli.simulated import simulated_machine
from dra.errors import ConfigError
from dra.plugin.machine import host_paths
from dra.plugin.settings import gates_without_effect, offers_passthrough, parse_crash_point, parse_gates


def read(*arguments, **environment):
    environment = {"NODE_NAME": "node-a", **environment}
    parser = argparse.ArgumentParser()
    add_arguments(parser, environment)
    return settings_from(parser.parse_args(arguments), environment)


# Source: flags and environment of NVIDIA's gpu-kubelet-plugin, as its chart sets them.
NVIDIA_FLAGS = [
    "--node-name=node-a", "--namespace=dra", "--cdi-root=/var/run/cdi", "--nvidia-driver-root=/run/nvidia/driver",
    "--container-driver-root=/driver-root", "--host-root=/host-root", "--nvidia-cdi-hook-path=/usr/bin/nvidia-cdi-hook",
    "--image-name=nvcr.io/x:1", "--image-pull-secrets=a,b", "--image-pull-policy=Always", "--service-account-name=sa",
    "--kubelet-registrar-directory-path=/k/plugins_registry", "--kubelet-plugins-directory-path=/k/plugins",
    "--healthcheck-port=51515", "--additional-xids-to-ignore=13,31", "--http-endpoint=:8080", "--metrics-path=/m",
    "--consumable-shares=memory", "--kubeconfig=/k/config", "--kube-api-qps=5", "--kube-api-burst=10",
    "--feature-gates=TimeSlicingSettings=true,DynamicMIG=false", "--logging-format=json", "-v=6",
    "--log-flush-frequency=5s", "--vmodule=a=1",
]  # fmt: skip


def test_every_flag_of_nvidias_plugin_parses_and_those_without_effect_are_listed():
    settings = read(*NVIDIA_FLAGS)
    assert (settings.node_name, settings.namespace) == ("node-a", "dra")
    assert settings.driver_root_host == "/run/nvidia/driver"
    assert settings.driver_root == Path("/driver-root")
    assert settings.registry_dir == Path("/k/plugins_registry")
    assert settings.healthcheck_port == 51515
    assert settings.ignored_xids == (13, 31)
    assert settings.gpus.base.sharing.strategy == "memory"
    assert settings.gates == {"TimeSlicingSettings": True, "DynamicMIG": False}
    assert set(settings.ignored) == {
        "--image-name", "--image-pull-secrets", "--image-pull-policy", "--service-account-name",
        "--log-flush-frequency", "--vmodule",
    }  # fmt: skip


def test_every_environment_name_of_nvidias_plugin_counts():
    settings = read(
        NAMESPACE="dra", CDI_ROOT="/cdi", NVIDIA_DRIVER_ROOT="/drv", DRIVER_ROOT_CTR_PATH="/ctr", HOST_ROOT="/host-root",
        NVIDIA_CDI_HOOK_PATH="/hook", IMAGE_NAME="i", IMAGE_PULL_SECRETS="s", IMAGE_PULL_POLICY="p",
        SERVICE_ACCOUNT_NAME="sa", HEALTHCHECK_PORT="51515", HTTP_ENDPOINT=":8080", CONSUMABLE_SHARES="8",
        POD_UID="0a1b2c3d-0000-4000-8000-0123456789ab", FEATURE_GATES="MPSSupport=false", KUBE_API_QPS="7.5",
    )  # fmt: skip
    assert settings.cdi_root == Path("/cdi")
    assert (settings.driver_root_host, settings.driver_root) == ("/drv", Path("/ctr"))
    assert settings.host_root == Path("/host-root")
    assert settings.pod_uid.startswith("0a1b2c3d")
    assert settings.gates == {"MPSSupport": False}
    assert (settings.kube_qps, settings.http_endpoint) == (7.5, ":8080")
    assert settings.gpus.base.sharing.shares == 8


def test_the_older_name_of_the_driver_root_counts_and_the_newer_wins():
    assert read(HOST_DRIVER_ROOT="/old").driver_root_host == "/old"
    assert read(HOST_DRIVER_ROOT="/old", NVIDIA_DRIVER_ROOT="/new").driver_root_host == "/new"


def test_a_flag_wins_over_the_environment():
    assert read("--node-name=node-b").node_name == "node-b"


def test_sharing_and_consumable_shares_are_one_flag():
    assert read("--sharing=unlimited").gpus == read("--consumable-shares=unlimited").gpus
    assert read("--sharing=unlimited").gpus.base.sharing.strategy == "unlimited"
    assert read("--sharing=4", "--feature-gates=ConsumableShares=false").gpus == read().gpus
    with pytest.raises(ConfigError, match="time"):
        read("--sharing=time")


def test_the_usual_directories_are_those_of_the_kubelet_and_of_cdi():
    paths = host_paths(read())
    assert paths.cdi_root == Path("/var/run/cdi")
    assert paths.kubelet_plugins_dir == Path("/var/lib/kubelet/plugins")
    assert paths.kubelet_registry_dir == Path("/var/lib/kubelet/plugins_registry")


def test_a_mounted_host_root_does_not_move_what_the_kubelet_has_to_find():
    paths = host_paths(read("--host-root=/host-root"))
    assert paths.proc == Path("/host-root/proc")
    assert paths.kubelet_registry_dir == Path("/var/lib/kubelet/plugins_registry")
    assert paths.cdi_root == Path("/var/run/cdi")


def test_a_simulated_node_has_everything_below_its_root(tmp_path):
    paths = host_paths(read("--simulate=dgx-h100", f"--host-root={tmp_path}"))
    for path in (
        paths.cdi_root,
        paths.kubelet_plugins_dir,
        paths.kubelet_registry_dir,
        paths.proc,
        paths.dev,
    ):
        assert path.is_relative_to(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--node-name="], "DRA-FLAG-NODE-NAME"),
        (["--node-name=Node_A"], "DRA-FLAG-NODE-NAME"),
        (["--driver-name=UPPER.example"], "DRA-FLAG-DRIVER-NAME"),
        (["--driver-name=" + "d" * 64], "DRA-FLAG-DRIVER-NAME"),
        (["--healthcheck-port=65536"], "DRA-FLAG-PORT"),
        (["--node-name=" + "n" * 254], "DRA-FLAG-NODE-NAME"),
        (["--additional-xids-to-ignore=a"], "DRA-FLAG-XIDS"),
        (["--feature-gates=Nonsense=true"], "DRA-FEATURE-GATE"),
        (["--feature-gates=DynamicMIG"], "DRA-FEATURE-GATE"),
        (["--feature-gates=DynamicMIG=yes"], "DRA-FEATURE-GATE"),
    ],
)
def test_what_cannot_work_is_refused_with_a_code(arguments, code):
    with pytest.raises(ConfigError) as caught:
        read(*arguments)
    assert caught.value.code == code
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        (["--node-name=" + "n" * 254], "at most 253 characters"),
        (["--driver-name=UPPER.example"], "gpu.nvidia.com"),
        (["--healthcheck-port=65536"], "1 to 65535"),
    ],
)
def test_a_name_or_port_that_cannot_be_says_what_can(arguments, remedy):
    with pytest.raises(ConfigError) as caught:
        read(*arguments)
    assert remedy in caught.value.remedy


@pytest.mark.parametrize(
    ("flag", "bad", "good", "range_"),
    [
        (
            "--inventory-interval",
            ("0", "0.5", "-1", "inf", "-inf", "nan", "1e300"),
            ("1", "30"),
            "from 1 to 86400",
        ),
        ("--start-jitter", ("-1", "inf", "nan", "3601"), ("0", "600"), "from 0 to 3600"),
        ("--kube-api-qps", ("-1", "inf", "nan", "1e9"), ("0", "0.5", "50"), "from 0 to 10000"),
        ("--kube-api-burst", ("0", "-5", "1000000", "9" * 400), ("1", "100"), "from 1 to 10000"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_flag_and_the_range(flag, bad, good, range_):
    for text in bad:
        with pytest.raises(ConfigError) as caught:
            read(f"{flag}={text}")
        assert caught.value.code == "DRA-FLAG-RANGE"
        assert flag in caught.value.message
        assert range_ in caught.value.remedy
    for text in good:
        read(f"{flag}={text}")


@pytest.mark.parametrize("name", ["LOG_VERBOSITY", "HEALTHCHECK_PORT", "KUBE_API_QPS", "INVENTORY_INTERVAL"])
def test_an_environment_variable_that_is_no_number_is_a_usage_error(name, capsys):
    with pytest.raises(SystemExit) as caught:
        read(**{name: "high"})
    assert caught.value.code == 2
    assert "'high'" in capsys.readouterr().err


def test_the_verbosity_of_kubernetes_components_is_read_from_the_environment():
    parser = argparse.ArgumentParser()
    add_arguments(parser, {"LOG_VERBOSITY": "7"})
    assert parser.parse_args([]).verbosity == 7


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_in_place_of_a_simulated_nodes_root_is_refused(tmp_path, inside):
    file = tmp_path / "file"
    file.write_text("x")
    root = file / "node" if inside else file
    with pytest.raises(ConfigError) as caught:
        simulated_machine(read("--simulate=t4-x1", f"--host-root={root}"))
    assert caught.value.code == "DRA-FLAG-HOST-ROOT"
    assert str(root) in caught.value.message
    assert "directory" in caught.value.remedy
    assert file.read_text() == "x"


@pytest.mark.parametrize(
    "flag", ["--cdi-exposure", "--nvml-hold", "--mig-mode", "--log-level", "--healthcheck-port"]
)
def test_a_value_outside_of_the_choices_is_a_usage_error(flag, capsys):
    with pytest.raises(SystemExit):
        read(f"{flag}=nonsense")
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize("name", ["NVML_HOLD", "MIG_MODE", "CDI_EXPOSURE"])
def test_a_value_outside_of_the_choices_is_refused_from_the_environment_too(name):
    with pytest.raises(ConfigError, match="cannot be 'nonsense'") as caught:
        read(**{name: "nonsense"})
    assert caught.value.code == "DRA-FLAG-VALUE"


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ([], "dynamic"),
        (["--feature-gates=DynamicMIG=true"], "dynamic"),
        (["--feature-gates=DynamicMIG=false"], "static"),
        (["--feature-gates=DynamicMIG=true", "--mig-mode=static"], "static"),
        (["--feature-gates=DynamicMIG=false", "--mig-mode=dynamic"], "dynamic"),
        (["--mig-mode=none"], "none"),
    ],
)
def test_partitions_on_demand_follow_the_flag_then_nvidias_gate(arguments, mode):
    settings = read(*arguments)
    assert settings.mig_mode == mode
    assert settings.ignored == ()


def test_gates_of_features_that_this_driver_lacks_are_named():
    gates = parse_gates("DynamicMIG=true, FabricManagerPartitioning=true,ComputeDomainCliques=false,")
    assert gates_without_effect(gates) == ("ComputeDomainCliques", "FabricManagerPartitioning")


@pytest.mark.parametrize(
    ("gates", "offered"),
    [("", False), ("DynamicMIG=true", False), ("PassthroughSupport=false", False), ("PassthroughSupport=true", True)],
)  # fmt: skip
def test_gpus_are_passed_through_only_where_somebody_said_so(gates, offered):
    settings = read(f"--feature-gates={gates}")
    assert offers_passthrough(settings.gates) is offered
    assert settings.ignored == ()


def test_a_crash_point_is_honoured_only_in_a_simulation():
    assert parse_crash_point("prepare:planned#3", simulate="dgx-h100") == ("prepare:planned", 3)
    assert parse_crash_point("prepare:planned", simulate="dgx-h100") == ("prepare:planned", 1)
    assert parse_crash_point("prepare:planned", simulate="") is None
    with pytest.raises(ConfigError):
        parse_crash_point("prepare:planned#x", simulate="dgx-h100")


def test_the_command_is_one_of_the_command_lines():
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["plugin", "--node-name", "n"])
    assert args.node_name == "n"
    assert callable(args.run)


def test_the_metrics_endpoint_is_checked_before_anything_starts():
    assert (
        read("--node-name=n", "--http-endpoint=[::1]:9", "--metrics-interval=15").metrics_interval_seconds
        == 15
    )
    for flag in ("--http-endpoint=nonsense", "--http-endpoint=:70000", "--metrics-interval=-1"):
        with pytest.raises(ConfigError, match=flag.partition("=")[0]):
            read("--node-name=n", flag)
    with pytest.raises(ConfigError, match="--metrics-path"):
        read("--node-name=n", "--http-endpoint=:1", "--metrics-path=metrics")
    assert read("--node-name=n", "--pprof-path=/debug").ignored == ("--pprof-path",)
