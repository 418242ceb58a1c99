"""The DeviceClasses that the fleet makes: from what is published, never taking what somebody else has."""

from __future__ import annotations

import pytest

from dra.fleet.classes import SHARED_CLASS, SHARED_RESOURCE, ClassKeeper, wanted_classes
from dra.kube.client import KubeClient
from dra.kube.connection import Connection, KubeOptions
from dra.sim.apiserver import SimApiServer

DRIVER = "gpu.nvidia.com"
CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"


def slice_with(*devices, driver=DRIVER):
    return {"driver": driver, "nodeName": "n", "devices": list(devices)}


def part(profile):
    return {"name": "m", "attributes": {"profile": {"string": profile}, "type": {"string": "mig"}}}


SHARED = {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}, "allowMultipleAllocations": True}
WHOLE = {"name": "gpu-1", "attributes": {"type": {"string": "gpu"}}}


def by_name(classes):
    return {each["metadata"]["name"]: each["spec"].get("extendedResourceName", "") for each in classes}


def wanted(*slices, existing=(), extended=True):
    return wanted_classes(slices, existing, driver=DRIVER, extended=extended)


def test_profiles_and_shared_cards_that_are_published_have_classes():
    found = by_name(wanted(slice_with(part("1g.10gb"), part("1g.10gb+me"), SHARED, WHOLE)))
    assert found == {
        "mig-1g.10gb.nvidia.com": "nvidia.com/mig-1g.10gb",
        "mig-1g.10gb.me.nvidia.com": "nvidia.com/mig-1g.10gb.me",
        SHARED_CLASS: SHARED_RESOURCE,
    }
    assert wanted(slice_with(WHOLE), slice_with(SHARED, part("1g.5gb"), driver="other.example")) == []
    assert by_name(wanted(slice_with(part("1g.10gb"), SHARED), extended=False)) == {
        "mig-1g.10gb.nvidia.com": "", SHARED_CLASS: "",
    }  # fmt: skip


def test_what_somebody_else_has_is_left_alone():
    theirs = [
        {"metadata": {"name": "mine"}, "spec": {"extendedResourceName": "nvidia.com/mig-1g.10gb"}},
        {"metadata": {"name": "mig-2g.20gb.nvidia.com"}, "spec": {}},
        {"metadata": {"name": "x"}, "spec": {"extendedResourceName": SHARED_RESOURCE}},
    ]
    found = by_name(wanted(slice_with(part("1g.10gb"), part("2g.20gb"), SHARED), existing=theirs))
    assert found == {"mig-1g.10gb.nvidia.com": "", SHARED_CLASS: ""}


def test_what_stands_is_not_written_again_and_what_was_changed_is_mended():
    first = wanted(slice_with(part("1g.10gb"), SHARED))
    assert wanted(slice_with(part("1g.10gb"), SHARED), existing=first) == []
    broken = [{**each, "spec": {}} for each in first]
    assert len(wanted(slice_with(part("1g.10gb"), SHARED), existing=broken)) == 2


@pytest.fixture
def api(tmp_path, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = SimApiServer()
    server.start()
    server.write_kubeconfig(tmp_path / "kubeconfig")
    yield server
    server.stop()


def test_they_are_made_in_the_api_and_the_selectors_are_valid_there(api, tmp_path):
    client = KubeClient(
        Connection(KubeOptions(kubeconfig=str(tmp_path / "kubeconfig"))), field_manager="fleet"
    )
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "s"},
        "spec": {
            **slice_with(part("1g.10gb"), SHARED),
            "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
        },
    }
    api.create("/apis/resource.k8s.io/v1/resourceslices", body)
    keeper = ClassKeeper(client, driver=DRIVER)
    keeper.look()
    first = api.request("GET", CLASSES)[1]["items"]
    assert by_name(first) == {
        "mig-1g.10gb.nvidia.com": "nvidia.com/mig-1g.10gb", SHARED_CLASS: SHARED_RESOURCE,
    }  # fmt: skip
    keeper.look()
    again = api.request("GET", CLASSES)[1]["items"]
    assert [each["metadata"]["resourceVersion"] for each in again] == [
        each["metadata"]["resourceVersion"] for each in first
    ]
    client.close()


@pytest.mark.fault("F44")
def test_a_class_that_somebody_made_or_changed_meanwhile_is_not_written_over(api, tmp_path, monkeypatch):
    client = KubeClient(
        Connection(KubeOptions(kubeconfig=str(tmp_path / "kubeconfig"))), field_manager="fleet"
    )
    body = {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "s"},
        "spec": {
            **slice_with(part("1g.10gb"), SHARED), "pool": {"name": "n", "generation": 1, "resourceSliceCount": 1},
        },
    }  # fmt: skip
    api.create("/apis/resource.k8s.io/v1/resourceslices", body)
    keeper = ClassKeeper(client, driver=DRIVER)
    keeper.look()
    theirs = {
        "metadata": {"labels": {"seen": "yes"}},
        "spec": {"extendedResourceName": None},
    }

    def edit(name, change):
        answer = api.request(
            "PATCH", f"{CLASSES}/{name}", change, content_type="application/merge-patch+json"
        )
        assert answer[0] == 200, answer

    # What is listed is old by the time of the write: a person was faster.
    for name in ("mig-1g.10gb.nvidia.com", SHARED_CLASS):
        edit(name, {"spec": {"extendedResourceName": "example.com/odd"}})
    listed = client.list

    def late(resource, *args, **options):
        found = listed(resource, *args, **options)
        if resource.plural == "deviceclasses":
            edit(SHARED_CLASS, theirs)
        return found

    monkeypatch.setattr(client, "list", late)
    keeper.look()
    found = {each["metadata"]["name"]: each for each in api.request("GET", CLASSES)[1]["items"]}
    assert "extendedResourceName" not in found[SHARED_CLASS]["spec"]
    assert found["mig-1g.10gb.nvidia.com"]["spec"]["extendedResourceName"] == "nvidia.com/mig-1g.10gb"
    monkeypatch.undo()
    keeper.look()
    found = {each["metadata"]["name"]: each for each in api.request("GET", CLASSES)[1]["items"]}
    assert found[SHARED_CLASS]["spec"]["extendedResourceName"] == SHARED_RESOURCE
    assert found[SHARED_CLASS]["metadata"]["labels"]["seen"] == "yes"
    client.close()
