"""Slices for an autoscaler: as many devices with the same meaning, and no real piece of hardware."""

from __future__ import annotations

import pytest

from dra.cli.main import main
from tests.yaml_text import read_all


def printed(capsys, *words):
    assert main(["inventory", "--profile", *words]) == 0
    documents = list(read_all(capsys.readouterr().out))
    devices = [device for each in documents for device in each["spec"].get("devices") or ()]
    return documents, {device["name"]: device for device in devices}


@pytest.mark.parametrize("profile", ["dgx-h100", "dgx-a100", "t4-x1"])
def test_a_template_says_what_a_node_of_the_kind_would_and_names_no_gpu(capsys, profile):
    _, real = printed(capsys, profile, "-o", "slices")
    documents, template = printed(capsys, profile, "-o", "slice-template")
    assert {each["spec"].get("nodeName", "template") for each in documents} == {"template"}
    assert {each["spec"]["pool"]["name"] for each in documents} == {"template"}
    assert list(template) == list(real)
    uuids = {}
    for name, device in template.items():
        assert {key: value for key, value in device.items() if key != "attributes"} == {
            key: value for key, value in real[name].items() if key not in ("attributes", "taints")
        }
        for attribute, value in device["attributes"].items():
            if attribute in ("uuid", "parentUUID"):
                assert value != real[name]["attributes"][attribute]
                # Devices of one GPU still agree.
                kept = uuids.setdefault(real[name]["attributes"][attribute]["string"], value["string"])
                assert kept == value["string"]
            else:
                assert value == real[name]["attributes"][attribute]
    assert len(set(uuids.values())) == len(uuids)


def test_it_can_have_a_name_and_shares(capsys):
    documents, template = printed(
        capsys, "l40s-x4", "-o", "slice-template", "--node-name", "gpu-pool-a", "--sharing", "10"
    )
    assert documents[0]["spec"]["pool"]["name"] == "gpu-pool-a"
    assert all(device["allowMultipleAllocations"] for device in template.values())
