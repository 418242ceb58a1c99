"""Deployments, ReplicaSets, Jobs and DaemonSets whose pods ask for GPUs."""

from __future__ import annotations

import pytest

from dra.sim.control.jobs import plan_job
from dra.sim.control.rollout import SetSize, plan_rollout
from tests.unit.sim.control_cluster import ControlCluster

APPS = "/apis/apps/v1/namespaces/default"
BATCH = "/apis/batch/v1/namespaces/default"


@pytest.fixture
def cluster():
    made = ControlCluster()
    made.gpu_class()
    made.template()
    made.gpu_node("node-a", 2)
    made.gpu_node("node-b", 2)
    return made


def pod_template(app="web", image="v1", **spec):
    container = {"name": "main", "image": image, "resources": {"claims": [{"name": "gpu"}]}}
    claims = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    return {
        "metadata": {"labels": {"app": app}},
        "spec": {"containers": [container], "resourceClaims": claims, **spec},
    }


def make(cluster, kind, base, plural, **spec):
    version = "batch/v1" if kind == "Job" else "apps/v1"
    if kind != "Job":
        spec["selector"] = {"matchLabels": {"app": "web"}}
    body = {"apiVersion": version, "kind": kind, "metadata": {"name": "web"}, "spec": spec}
    return cluster.call("POST", f"{base}/{plural}", body)


def settle(cluster, rounds=10):
    """Let controllers and kubelets take turns until nothing changes."""
    for _ in range(rounds):
        before = cluster.server.storage.revision
        cluster.sync()
        cluster.run_all()
        if cluster.server.storage.revision == before:
            return
    raise AssertionError("never quiet")


def get(cluster, plural, base=APPS):
    return cluster.call("GET", f"{base}/{plural}/web")


def test_a_deployment_runs_pods_with_a_gpu_each_and_says_that_it_is_available(cluster):
    make(cluster, "Deployment", APPS, "deployments", replicas=3, template=pod_template())
    settle(cluster)
    pods = cluster.list("pods")
    (replica_set,) = cluster.list("replicasets")
    assert len(pods) == 3
    assert all(pod["metadata"]["name"].startswith(f"{replica_set['metadata']['name']}-") for pod in pods)
    owner = replica_set["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("Deployment", "web", True)
    assert {pod["metadata"]["ownerReferences"][0]["uid"] for pod in pods} == {replica_set["metadata"]["uid"]}
    assert len(cluster.list("resourceclaims")) == 3
    status = get(cluster, "deployments")["status"]
    assert (status["replicas"], status["updatedReplicas"], status["availableReplicas"]) == (3, 3, 3)
    assert status["observedGeneration"] == get(cluster, "deployments")["metadata"]["generation"]
    conditions = {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}
    assert conditions["Available"] == ("True", "MinimumReplicasAvailable")
    assert conditions["Progressing"] == ("True", "NewReplicaSetAvailable")


def test_a_deployment_that_does_not_fit_runs_what_fits_and_is_not_available(cluster):
    make(cluster, "Deployment", APPS, "deployments", replicas=6, template=pod_template())
    settle(cluster)
    status = get(cluster, "deployments")["status"]
    assert (status["replicas"], status["availableReplicas"], status["unavailableReplicas"]) == (6, 4, 2)
    assert {c["type"]: c["status"] for c in status["conditions"]}["Available"] == "False"


def test_scaling_down_takes_waiting_pods_first_and_frees_gpus(cluster):
    make(cluster, "Deployment", APPS, "deployments", replicas=6, template=pod_template())
    settle(cluster)
    running = {pod["metadata"]["name"] for pod in cluster.list("pods") if pod["spec"].get("nodeName")}
    scale = cluster.call("GET", f"{APPS}/deployments/web/scale")
    scale["spec"]["replicas"] = 4
    cluster.call("PUT", f"{APPS}/deployments/web/scale", scale)
    settle(cluster)
    assert {pod["metadata"]["name"] for pod in cluster.list("pods")} == running
    scale = cluster.call("GET", f"{APPS}/deployments/web/scale")
    scale["spec"]["replicas"] = 1
    cluster.call("PUT", f"{APPS}/deployments/web/scale", scale)
    settle(cluster)
    assert len(cluster.list("pods")) == 1
    assert len(cluster.list("resourceclaims")) == 1


@pytest.mark.parametrize("strategy", ["RollingUpdate", "Recreate"])
def test_a_new_image_replaces_all_pods_and_the_old_set_stays_empty(cluster, strategy):
    make(
        cluster, "Deployment", APPS, "deployments",
        replicas=3, strategy={"type": strategy}, template=pod_template(),
    )  # fmt: skip
    settle(cluster)
    current = get(cluster, "deployments")
    current["spec"]["template"]["spec"]["containers"][0]["image"] = "v2"
    cluster.call("PUT", f"{APPS}/deployments/web", current)
    settle(cluster, rounds=30)
    pods = cluster.list("pods")
    assert [pod["spec"]["containers"][0]["image"] for pod in pods] == ["v2"] * 3
    sizes = {
        item["metadata"]["annotations"]["deployment.kubernetes.io/revision"]: item["spec"]["replicas"]
        for item in cluster.list("replicasets")
    }
    assert sizes == {"1": 0, "2": 3}
    assert len(cluster.list("resourceclaims")) == 3


def test_a_deleted_deployment_takes_sets_pods_and_claims_with_it(cluster):
    make(cluster, "Deployment", APPS, "deployments", replicas=2, template=pod_template())
    settle(cluster)
    cluster.call("DELETE", f"{APPS}/deployments/web")
    settle(cluster)
    assert [cluster.list(plural) for plural in ("replicasets", "pods", "resourceclaims")] == [[], [], []]


def test_a_replica_set_replaces_a_pod_that_was_deleted(cluster):
    make(cluster, "ReplicaSet", APPS, "replicasets", replicas=2, template=pod_template())
    settle(cluster)
    first = cluster.list("pods")[0]["metadata"]["name"]
    cluster.call("DELETE", f"/api/v1/namespaces/default/pods/{first}")
    settle(cluster)
    names = {pod["metadata"]["name"] for pod in cluster.list("pods")}
    assert len(names) == 2 and first not in names
    assert get(cluster, "replicasets")["status"]["readyReplicas"] == 2


def test_a_job_runs_its_completions_side_by_side_as_allowed_and_completes(cluster):
    template = pod_template(restartPolicy="Never")
    make(cluster, "Job", BATCH, "jobs", completions=3, parallelism=2, template=template)
    settle(cluster)
    assert len(cluster.list("pods")) == 2
    for _ in range(3):
        for pod in cluster.list("pods"):
            if pod["status"]["phase"] == "Running":
                cluster.end(pod["metadata"]["name"])
        settle(cluster)
    status = get(cluster, "jobs", BATCH)["status"]
    assert status["succeeded"] == 3 and "active" not in status
    assert [c["type"] for c in status["conditions"]] == ["SuccessCriteriaMet", "Complete"]
    assert len(cluster.list("pods")) == 3
    assert cluster.list("resourceclaims") == []


def test_a_job_whose_pods_fail_too_often_fails(cluster):
    template = pod_template(restartPolicy="Never")
    make(cluster, "Job", BATCH, "jobs", backoffLimit=1, template=template)
    for _ in range(3):
        settle(cluster)
        for pod in cluster.list("pods"):
            if pod["status"]["phase"] == "Running":
                cluster.end(pod["metadata"]["name"], "Failed")
    settle(cluster)
    status = get(cluster, "jobs", BATCH)["status"]
    assert [(c["type"], c["reason"]) for c in status["conditions"]] == [
        ("FailureTarget", "BackoffLimitExceeded"),
        ("Failed", "BackoffLimitExceeded"),
    ]
    assert len(cluster.list("pods")) == 2


def test_a_daemon_set_has_a_pod_on_each_node_also_on_later_ones(cluster):
    cluster.node("plain", taints=[{"key": "team", "value": "a", "effect": "NoSchedule"}])
    make(cluster, "DaemonSet", APPS, "daemonsets", template=pod_template())
    settle(cluster)
    assert sorted(pod["spec"]["nodeName"] for pod in cluster.list("pods")) == ["node-a", "node-b"]
    cluster.gpu_node("node-c", 1)
    settle(cluster)
    assert sorted(pod["spec"]["nodeName"] for pod in cluster.list("pods")) == ["node-a", "node-b", "node-c"]
    status = get(cluster, "daemonsets")["status"]
    assert (status["desiredNumberScheduled"], status["numberReady"]) == (3, 3)


def test_a_daemon_set_with_a_new_template_replaces_pod_by_pod(cluster):
    make(cluster, "DaemonSet", APPS, "daemonsets", template=pod_template())
    settle(cluster)
    current = get(cluster, "daemonsets")
    current["spec"]["template"]["spec"]["containers"][0]["image"] = "v2"
    cluster.call("PUT", f"{APPS}/daemonsets/web", current)
    cluster.sync()
    leaving = [pod for pod in cluster.list("pods") if pod["metadata"].get("deletionTimestamp")]
    assert len(leaving) == 1
    settle(cluster, rounds=20)
    assert [pod["spec"]["containers"][0]["image"] for pod in cluster.list("pods")] == ["v2", "v2"]


@pytest.mark.parametrize(
    ("strategy", "new", "old", "sizes"),
    [
        # One more than wanted is allowed: first grow by one.
        ({"maxSurge": 1, "maxUnavailable": 0}, (0, 0, 0), [(2, 2, 2)], {"new": 1}),
        # The new one is not available yet: wait.
        ({"maxSurge": 1, "maxUnavailable": 0}, (1, 1, 0), [(2, 2, 2)], {}),
        ({"maxSurge": 1, "maxUnavailable": 0}, (1, 1, 1), [(2, 2, 2)], {"old0": 1}),
        # No room above: first shrink by one.
        ({"maxSurge": 0, "maxUnavailable": 1}, (0, 0, 0), [(2, 2, 2)], {"old0": 1}),
        # Both zero cannot be meant.
        ({"maxSurge": 0, "maxUnavailable": 0}, (0, 0, 0), [(2, 2, 2)], {"old0": 1}),
        # Pods that do not work are no loss.
        ({"maxSurge": 0, "maxUnavailable": "50%"}, (0, 0, 0), [(2, 2, 0)], {"old0": 1}),
        ({"maxSurge": "100%", "maxUnavailable": 0}, (0, 0, 0), [(1, 1, 1), (1, 1, 1)], {"new": 2}),
    ],
)
def test_a_rolling_update_moves_within_surge_and_unavailable(strategy, new, old, sizes):
    found = plan_rollout(
        2,
        {"type": "RollingUpdate", "rollingUpdate": strategy},
        SetSize("new", *new),
        [SetSize(f"old{number}", *each) for number, each in enumerate(old)],
    )
    assert found == sizes


def test_recreate_waits_until_the_old_pods_are_gone():
    recreate = {"type": "Recreate"}
    assert plan_rollout(2, recreate, SetSize("new", 0, 0, 0), [SetSize("old", 2, 2, 2)]) == {"old": 0}
    assert plan_rollout(2, recreate, SetSize("new", 0, 0, 0), [SetSize("old", 0, 1, 0)]) == {}
    assert plan_rollout(2, recreate, SetSize("new", 0, 0, 0), [SetSize("old", 0, 0, 0)]) == {"new": 2}


def test_a_work_queue_makes_no_more_pods_once_one_has_succeeded():
    def pod(phase):
        return {"metadata": {}, "status": {"phase": phase}}

    job = {"spec": {"parallelism": 3}}
    assert plan_job(job, [pod("Running"), pod("Running")]) == 3
    assert plan_job(job, [pod("Running"), pod("Succeeded")]) == 1
