"""`dra uninstall-check`, which the chart's pre-delete hook runs."""

from __future__ import annotations

from dra.cli.main import main
from dra.sim.apiserver import SimApiServer

BASE = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"


def claim(api, name, *, driver="gpu.nvidia.com", users=("p",)):
    request = {"name": "r", "exactly": {"deviceClassName": "gpu.nvidia.com"}}
    made = api.create(BASE, {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
                             "spec": {"devices": {"requests": [request]}}})  # fmt: skip
    made["status"] = {
        "allocation": {"devices": {"results": [{"request": "r", "driver": driver, "pool": "node-a", "device": "gpu-3"}]}},
        "reservedFor": [{"resource": "pods", "name": user, "uid": f"uid-{user}"} for user in users],
    }  # fmt: skip
    status, answer = api.request("PUT", f"{BASE}/{name}/status", made)
    assert status == 200, answer


def test_claims_in_use_are_named_and_refuse_it(tmp_path, capsys):
    with SimApiServer(version="1.36").start() as api:
        words = ["uninstall-check", "--kubeconfig", str(api.write_kubeconfig(tmp_path / "kubeconfig"))]
        claim(api, "unused", users=())
        claim(api, "foreign", driver="other.example.com")
        assert main(words) == 0
        assert "the driver may go" in capsys.readouterr().out
        claim(api, "used", users=("trainer", "watcher"))
        assert main(words) == 1
        answer = capsys.readouterr()
        assert "error: DRA-UNINSTALL-CLAIMS: 1 claim of gpu.nvidia.com" in answer.err
        assert "Delete the pods that are named first" in answer.err
        said = answer.out
        assert "claim default/used on node-a: gpu-3, used by pod trainer, pod watcher" in said
        assert "unused" not in said and "foreign" not in said


def test_an_api_server_that_does_not_answer_is_no_leave_to_go(tmp_path, capsys):
    with SimApiServer(version="1.36").start() as api:
        kubeconfig = api.write_kubeconfig(tmp_path / "kubeconfig")
    assert main(["uninstall-check", "--kubeconfig", str(kubeconfig)]) == 2
    said = capsys.readouterr().err
    assert "error: DRA-API-UNREACHABLE" in said
    # The command itself does not.
    assert "The driver tries again by itself" in said and "is tried again" not in said
