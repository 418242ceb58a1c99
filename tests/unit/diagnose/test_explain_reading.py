"""Where `dra explain` reads from: dumps of kubectl, a live API server, with full and with partial rights."""

from __future__ import annotations

import json

import pytest
import yaml

from dra.cli.main import main
from dra.diagnose.explain import explain
from dra.diagnose.explain.files import read_files
from dra.errors import ConfigError
from dra.sim.apiserver import SimApiServer
from tests.unit.diagnose.explain_world import claim, device_class, gpus, held, holder_pod, node, pod

WORLD = [node("n1"), gpus("n1"), device_class(), pod("train", "want"), claim("want"), held("big", "n1", "gpu-0", "gpu-1"),
         holder_pod()]  # fmt: skip


def write(folder, name, document):
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def listed(objects, kind="List"):
    return {"apiVersion": "v1", "kind": kind, "items": objects}


# -- files -----------------------------------------------------------------------------------------


def test_one_list_in_json_is_enough(tmp_path):
    answer = explain(
        read_files([write(tmp_path, "all.json", listed(WORLD))]), "pod/train", namespace="team-a"
    )
    assert answer.reasons[0].code == "held"
    assert "Event" in answer.unread


def test_several_files_and_documents_of_yaml_are_put_together(tmp_path):
    first = write(tmp_path, "a.yaml", yaml.safe_dump_all(WORLD[:3]))
    second = write(tmp_path, "b.yaml", yaml.safe_dump(listed(WORLD[3:])))
    assert explain(read_files([first, second]), "train").reasons[0].code == "held"


def test_a_folder_is_read_whole(tmp_path):
    for number, item in enumerate(WORLD):
        write(tmp_path, f"{number}.json", item)
    write(tmp_path, "notes.txt", "not for us")
    assert explain(read_files([str(tmp_path)]), "pod/train").reasons[0].code == "held"


def test_json_documents_may_follow_each_other(tmp_path):
    text = "\n".join(json.dumps(item, indent=1) for item in WORLD)
    assert explain(read_files([write(tmp_path, "all.json", text)]), "pod/train").reasons[0].code == "held"


def test_raw_lists_of_the_api_have_items_without_a_kind(tmp_path):
    bare = [
        {key: value for key, value in item.items() if key not in ("kind", "apiVersion")}
        for item in (WORLD[3], WORLD[6])
    ]
    paths = [
        write(tmp_path, "pods.json", listed(bare, "PodList")),
        write(tmp_path, "rest.json", listed([WORLD[number] for number in (0, 1, 2, 4, 5)])),
    ]
    assert explain(read_files(paths), "pod/train").reasons[0].code == "held"


def test_objects_of_an_older_version_are_understood(tmp_path):
    old_claim = {
        "apiVersion": "resource.k8s.io/v1beta1", "kind": "ResourceClaim",
        "metadata": {"name": "want", "namespace": "team-a", "uid": "u"},
        "spec": {"devices": {"requests": [{"name": "gpu", "deviceClassName": "gpu.nvidia.com", "count": 9}]}},
    }  # fmt: skip
    slices = gpus("n1")
    slices["apiVersion"] = "resource.k8s.io/v1beta1"
    slices["spec"]["devices"] = [
        {"name": item["name"], "basic": {key: value for key, value in item.items() if key != "name"}}
        for item in slices["spec"]["devices"]
    ]
    objects = [node("n1"), slices, device_class(), pod("train", "want"), old_claim]
    answer = explain(read_files([write(tmp_path, "all.json", listed(objects))]), "pod/train")
    assert answer.verdict == "it needs 9 matching devices on one node, the largest node has 2 (n1)"


def test_times_without_quotes_stay_text(tmp_path):
    text = yaml.safe_dump(claim("want")).replace(
        "metadata:", "metadata:\n  deletionTimestamp: 2026-09-01T11:00:00Z", 1
    )
    paths = [write(tmp_path, "a.yaml", text), write(tmp_path, "b.json", listed([*WORLD[:4], WORLD[5]]))]
    assert "being deleted since 2026-09-01T11:00:00Z" in explain(read_files(paths), "pod/train").verdict


def test_the_servers_version_may_lie_beside_the_objects(tmp_path):
    paths = [
        write(tmp_path, "all.json", listed(WORLD)),
        write(tmp_path, "version.json", {"serverVersion": {"gitVersion": "v1.36.2"}}),
    ]
    assert read_files(paths).version == "v1.36.2"


def test_kinds_that_no_file_has_are_not_taken_for_empty(tmp_path):
    answer = explain(
        read_files([write(tmp_path, "pod.json", listed([WORLD[3], WORLD[4], WORLD[2]]))]), "pod/train"
    )
    assert answer.reasons[0].code == "not-read"
    assert "ResourceSlices not in the files" in answer.verdict


@pytest.mark.parametrize(("name", "text"), [("a.json", "{"), ("b.yaml", "a: [1"), ("c.yaml", "just words")])
def test_what_is_no_dump_is_refused_by_name(tmp_path, name, text):
    with pytest.raises(ConfigError, match=name):
        read_files([write(tmp_path, name, text)])


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="missing.yaml: No such file"):
        read_files([str(tmp_path / "missing.yaml")])


# -- the command -----------------------------------------------------------------------------------


def test_the_command_reads_files_and_exits_with_1_for_a_pending_pod(tmp_path, capsys):
    path = write(tmp_path, "all.json", listed(WORLD))
    assert main(["explain", "pod/train", "-n", "team-a", "-f", path]) == 1
    assert capsys.readouterr().out.startswith(
        "pod team-a/train is pending: all 2 matching devices on n1 are held"
    )


def test_the_command_exits_with_0_for_an_allocated_claim(tmp_path, capsys):
    path = write(tmp_path, "all.json", listed(WORLD))
    assert main(["explain", "claim/big", "-f", path, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "allocated"


def test_the_command_exits_with_2_for_what_is_not_there(tmp_path, capsys):
    path = write(tmp_path, "all.json", listed(WORLD))
    assert main(["explain", "pod/none", "-f", path]) == 2
    assert "DRA-EXPLAIN-NOT-FOUND" in capsys.readouterr().err


# -- live ------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    with SimApiServer() as running:
        running.kubeconfig = str(running.write_kubeconfig(tmp_path / "kubeconfig"))
        post(
            running,
            "/api/v1/namespaces",
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team-a"}},
        )
        post(running, "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})
        group = "/apis/resource.k8s.io/v1"
        post(running, f"{group}/deviceclasses", bare(device_class()))
        post(running, f"{group}/resourceslices", bare(gpus("n1")))
        post(running, f"{group}/namespaces/team-a/resourceclaims", bare(claim("want", {
            "name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "count": 3}})))  # fmt: skip
        waits = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "train", "namespace": "team-a"},
            "spec": {"containers": [{"name": "main", "image": "x"}],
                     "resourceClaims": [{"name": "c", "resourceClaimName": "want"}]},
        }  # fmt: skip
        post(running, "/api/v1/namespaces/team-a/pods", waits)
        yield running


def bare(item):
    metadata = {key: value for key, value in item["metadata"].items() if key != "uid"}
    return {key: value for key, value in item.items() if key != "status"} | {"metadata": metadata}


def post(server, path, body):
    status, answer = server.request("POST", path, body)
    assert status == 201, answer


def run(server, *words):
    return main(["explain", "pod/train", "-n", "team-a", "--kubeconfig", server.kubeconfig, *words])


def test_a_live_cluster_is_explained_with_nothing_but_reads(server, capsys):
    assert run(server) == 1
    assert "it needs 3 matching devices on one node, the largest node has 2 (n1)" in capsys.readouterr().out
    assert {entry.method for entry in server.requests.all()} == {"GET"}


def deny(server, path):
    message = 'resource is forbidden: User "u" cannot list resource "x" in API group "" at the cluster scope'
    server.faults.set("error", path=path, code=403, message=message)


def test_with_rights_to_the_namespace_alone_the_rest_is_said_to_be_unknown(server, capsys):
    for path in (r"^/api/v1/pods", r"^/api/v1/nodes", r"^/api/v1/namespaces/team-a$", r"v1/resourceclaims\?"):
        deny(server, path)
    assert run(server, "-o", "json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["reasons"][0]["code"] == "too-many"
    assert document["notKnown"]["ResourceClaim"].startswith("only namespace team-a may be read")
    assert document["notKnown"]["Node"].startswith("may not be read")


def test_without_the_right_to_slices_no_cause_is_invented(server, capsys):
    deny(server, "resourceslices")
    assert run(server) == 1
    assert "it cannot be told why: ResourceSlices may not be read" in capsys.readouterr().out


def test_a_server_that_does_not_answer_is_no_verdict(server, capsys):
    server.faults.set("error", path="resourceslices", code=500)
    assert run(server) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "DRA-API-INTERNAL" in captured.err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("apiVersion: v1\nitems:\n- apiVersion: v1\n  kind: Pod\n  metadata: {name: a}\n", "the kind of the list is missing"),
        ('{"apiVersion": "v1", "items": [{"kind": "Pod", "meta', "is not a dump"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "it nests too deeply"),
    ],
)  # fmt: skip
def test_a_dump_that_was_cut_or_is_none_is_refused(tmp_path, text, why):
    file = tmp_path / "dump"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why) as refused:
        read_files([str(file)])
    assert refused.value.code == "DRA-DUMP-FORMAT"


def test_a_dump_in_the_encoding_of_powershell_is_read(tmp_path):
    file = tmp_path / "dump.json"
    file.write_text(json.dumps(listed(WORLD)), encoding="utf-16")
    assert explain(read_files([str(file)]), "pod/train", namespace="team-a").reasons
