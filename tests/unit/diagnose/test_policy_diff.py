"""`dra policy`: what would change, what it would wait for, and mig-parted's configurations as policies."""

from __future__ import annotations

import contextlib

import pytest
import yaml

from dra.api.policy import decode_policy, read_policy
from dra.cli.main import main
from dra.diagnose.mig_parted import mig_parted
from dra.diagnose.policy import FLAGS, diff_policies, fleet_gpus, fleet_status, with_files
from dra.errors import ConfigError

UUIDS = [f"GPU-00000000-0000-0000-0000-00000000000{n}" for n in range(2)]


def policy(name="p", *groups, created="2026-01-01T00:00:00Z", **spec):
    return {
        "apiVersion": "gpudra.dev/v1alpha1",
        "kind": "GpuNodePolicy",
        "metadata": {"name": name, "generation": 1, "creationTimestamp": created},
        "spec": {"gpus": list(groups), **spec},
    }


def whole(minor):
    attributes = {"productName": {"string": "NVIDIA H100"}, "uuid": {"string": UUIDS[minor]}}
    attributes["resource.kubernetes.io/pciBusID"] = {"string": f"0000:1{minor}:00.0"}
    return {"name": f"gpu-{minor}", "attributes": attributes}


def part(minor, profile, place):
    attributes = {"productName": {"string": "NVIDIA H100"}, "parentUUID": {"string": UUIDS[minor]}}
    return {"name": f"gpu-{minor}-mig-{profile}-19-{place}", "attributes": attributes}


def slices(*devices, node="n1", driver="gpu.nvidia.com"):
    return [{"spec": {"driver": driver, "nodeName": node, "pool": {"name": node}, "devices": list(devices)}}]


def claim(name, device, node="n1"):
    result = {"driver": "gpu.nvidia.com", "pool": node, "device": device, "request": "r"}
    return {
        "metadata": {"namespace": "team", "name": name},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }


SHARES = {"sharing": {"strategy": "shares", "shares": 4}}


def test_changes_say_from_what_to_what_when_and_what_they_wait_for():
    gpus = fleet_gpus(slices(whole(0), whole(1)), [claim("train", "gpu-1")], driver="gpu.nvidia.com")
    after = [decode_policy(policy("p", {**SHARES, "attributes": {"rail": {"int": 2}}}))]
    found = diff_policies([], after, labels={}, gpus=gpus)
    rows = [(c.device, c.block, c.before, c.after, c.when, c.waits_for) for c in found.changes]
    assert rows == [
        ("gpu-0", "sharing", FLAGS, "4", "when idle", ()),
        ("gpu-0", "attributes", FLAGS, "rail=2", "at once", ()),
        ("gpu-1", "sharing", FLAGS, "4", "when idle", ("team/train",)),
        ("gpu-1", "attributes", FLAGS, "rail=2", "at once", ()),
    ]
    assert diff_policies(after, after, labels={}, gpus=gpus).changes == ()
    back = diff_policies(after, [], labels={}, gpus=gpus)
    assert [(c.before, c.after) for c in back.changes if c.block == "sharing"] == [("4", FLAGS)] * 2


def test_a_claim_that_has_a_gpu_passed_through_is_waited_for():
    place = {"resource.kubernetes.io/pciBusID": {"string": "0000:11:00.0"}, "type": {"string": "vfio"}}
    devices = (whole(0), whole(1), {"name": "gpu-vfio-0", "attributes": place})
    gpus = fleet_gpus(slices(*devices), [claim("machine", "gpu-vfio-0")], driver="gpu.nvidia.com")
    found = diff_policies([], [decode_policy(policy("p", SHARES))], labels={}, gpus=gpus)
    assert [(c.device, c.waits_for) for c in found.changes] == [("gpu-0", ()), ("gpu-1", ("team/machine",))]


def test_a_gpu_is_known_by_its_partitions_too_and_an_unknown_profile_is_doubted():
    gpus = fleet_gpus(slices(part(0, "1g10gb", 0), part(0, "3g40gb", 4)), [], driver="gpu.nvidia.com")
    assert [(gpu.device, gpu.identity.uuid) for gpu in gpus] == [("gpu-0", UUIDS[0])]
    layout = {"mig": {"mode": "static", "layout": {"1g.10gb": 1, "7g.80gb": 1}}}
    (change,) = diff_policies([], [decode_policy(policy("p", layout))], labels={}, gpus=gpus).changes
    assert change.after == "static: 1 x 1g.10gb + 1 x 7g.80gb"
    assert "7g.80gb" in change.doubt
    assert "1g.10gb" not in change.doubt


def test_conflicts_after_the_change_are_told_and_a_file_keeps_the_age_of_what_it_replaces():
    gpus = fleet_gpus(slices(whole(0)), [], driver="gpu.nvidia.com")
    old = policy("old", SHARES, created="2020-01-01T00:00:00Z")
    rewritten = policy("old", {"sharing": {"strategy": "memory"}})
    del rewritten["metadata"]["creationTimestamp"]
    other = policy("other", SHARES)
    after = with_files([old, other], [rewritten])
    found = diff_policies([], after, labels={}, gpus=gpus)
    assert found.changes[0].after == "memory"
    assert "old, counts" in found.conflicts[0]
    with pytest.raises(ExceptionGroup) as wrong:
        with_files([old], [], ["nobody"])
    assert "there is no GpuNodePolicy nobody" in str(wrong.value.exceptions[0])
    assert [each.name for each in with_files([old, other], [], ["old"])] == ["other"]


def test_mig_parted_configurations_become_policies():
    config = {
        "version": "v1",
        "mig-configs": {
            "all-balanced": [
                {"devices": "all", "mig-enabled": True, "mig-devices": {"1g.10gb": 2, "3g.40gb": 1}}
            ],
            "all-disabled": [{"devices": "all", "mig-enabled": False}],
        },
    }
    balanced, disabled = mig_parted(config)
    assert balanced["spec"]["nodeSelector"] == {"matchLabels": {"nvidia.com/mig.config": "all-balanced"}}
    assert balanced["spec"]["gpus"][0]["mig"] == {"mode": "static", "layout": {"1g.10gb": 2, "3g.40gb": 1}}
    assert disabled["spec"]["gpus"][0]["mig"] == {"mode": "none"}
    assert [each["metadata"]["name"] for each in mig_parted(config, "all-disabled")] == ["mig-all-disabled"]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"mig-configs": {"a": [{"devices": [0, 1], "mig-enabled": True}]}},
        {"mig-configs": {"a": [{"devices": "all", "device-filter": "0x1", "mig-enabled": True}]}},
        {"mig-configs": {"a": ["x"]}},
        {"mig-configs": {"a": []}},
    ],
)
def test_what_has_no_counterpart_is_refused(config):
    with pytest.raises(ConfigError) as caught:
        mig_parted(config)
    assert caught.value.code in ("DRA-MIG-PARTED", "DRA-POLICY-INVALID")
    assert caught.value.remedy


def test_the_status_counts_nodes_and_names_those_that_say_nothing():
    gpu = {"device": "gpu-0", "state": "Waiting", "message": "gpu-0 waits", "claims": ["team/train"]}
    reports = [
        {"metadata": {"name": "n1"}, "status": {"policies": [{"name": "p", "generation": 1}], "gpus": [gpu]}},
        {"metadata": {"name": "n2"}, "status": {"policies": [{"name": "p", "generation": 0}], "gpus": []}},
    ]
    found = fleet_status([policy("p", SHARES)], reports, nodes_with_slices=["n1", "n2", "n3"])
    (row,) = found.policies
    assert (row.matching, row.applied, row.waiting, row.refused) == (2, 0, 2, 0)
    assert [(each.node, each.claims) for each in found.gpus] == [("n1", ("team/train",))]
    assert found.silent == ("n3",)
    assert not found.settled


def test_the_command_turns_a_file_and_refuses_what_is_none(tmp_path, capsys):
    good = tmp_path / "config.yaml"
    good.write_text(
        "version: v1\nmig-configs:\n  half:\n  - devices: all\n    mig-enabled: true\n    mig-devices: {1g.5gb: 3}\n"
    )
    assert main(["policy", "from-mig-parted", str(good)]) == 0
    assert "1g.5gb: 3" in capsys.readouterr().out
    good.write_text("{")
    assert main(["policy", "from-mig-parted", str(good)]) != 0
    assert f"DRA-MIG-PARTED: {good}:1: " in capsys.readouterr().err


@pytest.mark.parametrize("content", ["a: [", None])
def test_a_file_of_policies_that_cannot_be_read_is_named(tmp_path, capsys, content):
    file = tmp_path / "policies.yaml"
    if content is not None:
        file.write_text(content)
    assert main(["policy", "diff", str(file)]) == 2
    assert f"DRA-POLICY-FILE: {file}:" in capsys.readouterr().err


def test_an_invalid_policy_in_the_cluster_holds_its_nodes_and_leaves_the_others_comparable():
    gpus = fleet_gpus(slices(whole(0)) + slices(whole(0), node="n2"), [], driver="gpu.nvidia.com")
    labels = {"n1": {"pool": "a"}, "n2": {"pool": "b"}}
    chosen = {"nodeSelector": {"matchLabels": {"pool": "a"}}}
    bad = policy("bad", {"timeSlice": "Forever"}, **chosen)
    mended = policy("bad", SHARES, **chosen)
    current = [read_policy(bad)]
    found = diff_policies(current, with_files([bad], [policy("p", SHARES)]), labels=labels, gpus=gpus)
    assert [(each.node, each.block) for each in found.changes] == [("n2", "sharing")]
    (held,) = found.held
    assert "GpuNodePolicy bad" in held and "n1" in held and "n2" not in held
    found = diff_policies(current, with_files([bad], [mended]), labels=labels, gpus=gpus)
    assert [(each.node, each.block) for each in found.changes] == [("n1", "sharing")]
    assert found.held == ()


def test_all_that_is_wrong_with_the_files_is_said_at_once(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("dra.cli.policy.cluster_client", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("dra.cli.policy._list", lambda *_: ())
    file = tmp_path / "p.yaml"
    file.write_text(
        yaml.safe_dump_all(
            [
                policy("one", {"timeSlice": "Forever"}),
                policy("good", SHARES),
                policy("two", {"sharing": "much"}),
            ]
        )
    )
    assert main(["policy", "diff", str(file), "--delete", "nobody"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert [line.split(": ")[1] for line in said] == [
        "DRA-POLICY-UNKNOWN",
        "DRA-POLICY-INVALID",
        "DRA-POLICY-INVALID",
    ]
    assert "GpuNodePolicy one" in said[1] and "GpuNodePolicy two" in said[2]
    file.write_text("a: [\n---\nb: }\n")
    assert main(["policy", "diff", str(file)]) == 2
    assert capsys.readouterr().err.count("error: DRA-POLICY-FILE") == 2


def test_nodes_that_stand_still_are_named_in_the_status():
    still = {
        "metadata": {"name": "n1"},
        "status": {
            "gpus": [{"device": "gpu-0", "state": "Applied"}],
            "conditions": [
                {
                    "type": "Applied",
                    "status": "False",
                    "reason": "PolicyInvalid",
                    "message": "nothing is changed",
                }
            ],
        },
    }
    found = fleet_status([policy("p", SHARES)], [still])
    assert [(row.node, row.device, row.state, row.message) for row in found.gpus] == [
        ("n1", "", "Waiting", "nothing is changed")
    ]
    assert not found.settled
