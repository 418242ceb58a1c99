"""`dra mig plan` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dra.cli.main import main
from dra.sim.apiserver import SimApiServer
from tests.unit.slices.mig_machines import partitioned, pool_of, slices_of
from tests.yaml_text import read_all

ROOT = Path(__file__).parents[3]


def run(capsys, *words):
    code = main(["mig", "plan", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_mix_on_a_model_is_a_table_and_a_picture(capsys):
    code, out, err = run(capsys, "--gpu", "h100-80", "--want", "3g.40gb=1,1g.10gb=4")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "It fits on 1 GPU."
    assert lines[2].split() == ["GPU", "PARTITION", "SLICES", "STATE", "HOLDER"]
    assert lines[3].split() == ["model/gpu-0", "1g.10gb", "0", "new", "-"]
    assert any("3g.40gb*" in line and line.count("1g.10gb*") == 4 for line in lines)


@pytest.mark.parametrize("count", ["1001", "99999999999999999999"])
def test_a_count_that_is_too_large_is_told_from_a_profile_that_there_is_not(capsys, count):
    code, out, err = run(capsys, "--gpu", "h100-80", "--want", f"1g.10gb={count}")
    assert (code, out) == (2, "")
    assert f"'1g.10gb={count}' is more than 1000 of a kind" in err
    assert "is no profile" in run(capsys, "--gpu", "h100-80", "--want", f"9g.90gb={count}")[2]


def test_the_same_as_data(capsys):
    code, out, _ = run(capsys, "--gpu", "a100-40x2", "--want", "4g.20gb=2", "--want", "3g.20gb", "-o", "json")
    assert code == 0
    found = json.loads(out)
    assert found["fits"]
    assert [each["for"] for each in found["wanted"]] == ["4g.20gb=2", "3g.20gb"]
    assert [len(each["partitions"]) for each in found["layouts"]] == [2, 1]


def test_the_claims_of_manifests_on_a_simulated_machine(capsys):
    example = str(ROOT / "examples/mig-layout.yaml")
    code, out, _ = run(capsys, example, "--simulate", "dgx-h100", "-o", "json")
    assert code == 0
    (layout,) = json.loads(out)["layouts"]
    assert layout["node"] == "dgx-h100"
    profiles = sorted(each["profile"] for each in layout["partitions"])
    assert profiles == ["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"]


def test_a_dump_of_a_cluster_with_what_is_in_the_way(capsys, tmp_path):
    slices = [
        {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", **each}
        for each in slices_of(pool_of(partitioned("h100-nvl-x2")))
    ]
    claims = [
        {
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": f"job-{gpu}", "namespace": "team"}, "spec": {},
            "status": {"allocation": {"devices": {"results": [
                {"request": "r", "driver": "gpu.nvidia.com", "pool": "node-1", "device": f"gpu-{gpu}-mig-1g12gb-19-1"}
            ]}}},
        }
        for gpu in range(2)
    ]  # fmt: skip
    dump = tmp_path / "cluster.yaml"
    dump.write_text(yaml.safe_dump_all([*slices, *claims]))
    code, out, _ = run(capsys, "-f", str(dump), "--want", "4g.47gb")
    assert code == 1
    assert "1g.12gb at slice 1 of team/job-" in out
    assert run(capsys, "-f", str(dump), "--want", "3g.47gb=2")[0] == 0
    assert run(capsys, "-f", str(dump), "--node", "nowhere", "--want", "gpu")[0] == 2


def test_what_does_not_fit_is_said_by_the_exit_code(capsys):
    code, out, _ = run(capsys, "--gpu", "a30-24", "--want", "4g.24gb=1,1g.6gb=1")
    assert code == 1
    assert out.startswith("It does not fit: no place for 1 x 1g.6gb.")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--gpu", "abacus", "--want", "1g.10gb"), "DRA-MIG-MODEL"),
        (("--gpu", "h100-80x0", "--want", "1g.10gb"), "DRA-MIG-MODEL"),
        (("--gpu", "h100-80", "--want", "1g.5gb"), "DRA-MIG-WANT"),
        (("--gpu", "h100-80"), "DRA-MIG-WANT"),
        (("--simulate", "l40s-x4", "--want", "1g.5gb"), "DRA-MIG-NO-GPU"),
    ],
)
def test_wrong_words_are_an_error_with_a_remedy(capsys, words, code):
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {code}: ")
    assert len(err.splitlines()) == 2


def test_colour_is_asked_for_and_needs_a_library(capsys):
    plain = run(capsys, "--gpu", "h100-80", "--want", "2g.20gb", "-o", "picture")
    assert run(capsys, "--gpu", "h100-80", "--want", "2g.20gb", "-o", "picture", "--colour") == plain


def test_a_plan_on_a_cluster_reads_the_cluster(tmp_path, capsys):
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
    assert main(["inventory", "--simulate", "dgx-h100", "-o", "slices"]) == 0
    with SimApiServer(version="1.36").start() as api:
        api.create("/api/v1/nodes", node)
        for body in read_all(capsys.readouterr().out):
            for item in body.get("items", [body]):
                api.create("/apis/resource.k8s.io/v1/resourceslices", item)
        kubeconfig = str(api.write_kubeconfig(tmp_path / "kubeconfig"))
        status = main(["mig", "plan", "--cluster", "--kubeconfig", kubeconfig, "--want", "4g.40gb=1"])
    said = capsys.readouterr()
    assert said.err == ""
    assert status == 0
    assert "4g.40gb*" in said.out
