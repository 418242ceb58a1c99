"""The committed messages are what the definitions give, and have the kubelet's wire form."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from dra.pb import dra_v1_pb2, dra_v1beta1_pb2, health_v1_pb2, health_v1alpha1_pb2, registration_pb2
from dra.pb.services import ALL_METHODS, PREPARE_V1, WATCH_HEALTH_V1, WATCH_HEALTH_V1ALPHA1

REPOSITORY = Path(__file__).parents[3]


def test_the_committed_code_is_what_the_definitions_generate(tmp_path):
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed (dependency group `proto`)")
    subprocess.run([sys.executable, REPOSITORY / "proto/generate.py", tmp_path], check=True, timeout=60)
    made = {path.name: path.read_text() for path in (tmp_path / "dra/pb").iterdir()}
    committed = {
        path.name: path.read_text() for path in (REPOSITORY / "dra/pb").iterdir() if "_pb2.py" in path.name
    }
    assert made == committed
    assert len(made) == 12


def test_no_generated_service_stubs_are_shipped():
    assert not list((REPOSITORY / "dra/pb").glob("*_pb2_grpc*"))


@pytest.mark.parametrize("method", ALL_METHODS, ids=lambda method: method.path)
def test_each_method_exists_in_its_definition_with_these_classes(method):
    file = method.request.DESCRIPTOR.file
    service = file.services_by_name[method.service.rpartition(".")[2]]
    assert service.full_name == method.service
    described = service.methods_by_name[method.name]
    assert described.input_type is method.request.DESCRIPTOR
    assert described.output_type is method.response.DESCRIPTOR
    assert described.server_streaming is method.response_streams


def test_the_paths_are_those_that_the_kubelet_calls():
    assert PREPARE_V1.path == "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
    assert WATCH_HEALTH_V1ALPHA1.path == "/v1alpha1.DRAResourceHealth/NodeWatchResources"
    assert WATCH_HEALTH_V1.path == "/v1.DRAResourceHealth/NodeWatchResources"


def test_a_claim_has_its_uid_in_field_two():
    claim = dra_v1_pb2.Claim(namespace="n", uid="u", name="c")
    assert claim.SerializeToString() == b"\n\x01n\x12\x01u\x1a\x01c"


def test_a_device_with_a_share_id_has_the_kubelets_bytes():
    device = dra_v1_pb2.Device(
        request_names=["r"], pool_name="p", device_name="d", cdi_device_ids=["c"], share_id="s"
    )
    assert device.SerializeToString() == b"\n\x01r\x12\x01p\x1a\x01d\x22\x01c*\x01s"


def test_a_kubelet_of_v1beta1_reads_our_v1_device_and_loses_only_the_share_id():
    sent = dra_v1_pb2.Device(request_names=["r"], pool_name="p", device_name="d", share_id="s")
    read = dra_v1beta1_pb2.Device.FromString(sent.SerializeToString())
    assert (list(read.request_names), read.pool_name, read.device_name) == (["r"], "p", "d")


def test_a_share_id_that_was_not_set_is_not_on_the_wire():
    assert not dra_v1_pb2.Device(pool_name="p").HasField("share_id")
    assert b"*" not in dra_v1_pb2.Device(pool_name="p").SerializeToString()


def test_a_response_entry_is_a_map_entry_with_the_error_in_field_two():
    response = dra_v1_pb2.NodePrepareResourcesResponse()
    response.claims["u"].error = "e"
    assert response.SerializeToString() == b"\n\x08\n\x01u\x12\x03\x12\x01e"


@pytest.mark.parametrize("module", [health_v1_pb2, health_v1alpha1_pb2], ids=["v1", "v1alpha1"])
def test_a_health_message_has_the_kubelets_bytes(module):
    message = module.NodeWatchResourcesResponse(
        devices=[
            module.DeviceHealth(
                device=module.DeviceIdentifier(pool_name="p", device_name="d"),
                health=module.HEALTHY,
                last_updated_time=5,
                health_check_timeout_seconds=30,
                message="m",
            )
        ]
    )
    assert message.SerializeToString() == b"\n\x11\n\x06\n\x01p\x12\x01d\x10\x01\x18\x05 \x1e*\x01m"


def test_plugin_info_has_the_kubelets_bytes():
    info = registration_pb2.PluginInfo(type="t", name="n", endpoint="e", supported_versions=["v"])
    assert info.SerializeToString() == b"\n\x01t\x12\x01n\x1a\x01e\x22\x01v"
