"""StatefulSets, CronJobs, numbered Jobs, deadlines: workloads that depend on order and time."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from dra.api.rules.cron import ScheduleError, parse_schedule
from dra.sim.control.jobs import spans
from tests.unit.sim.control_cluster import ControlCluster
from tests.unit.sim.test_control_workloads import APPS, BATCH, get, make, pod_template, settle

START = datetime(2030, 6, 3, 10, 0, 30, tzinfo=UTC).timestamp()  # a Monday


class Clock:
    def __init__(self):
        self.now = START

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cluster(clock):
    made = ControlCluster(clock=clock)
    made.gpu_class()
    made.template()
    made.gpu_node("node-a", 4)
    return made


def names(cluster):
    return sorted(pod["metadata"]["name"] for pod in cluster.list("pods"))


def images(cluster):
    return {pod["metadata"]["name"]: pod["spec"]["containers"][0]["image"] for pod in cluster.list("pods")}


def change(cluster, plural, base=APPS, **spec):
    current = get(cluster, plural, base)
    current["spec"].update(spec)
    cluster.call("PUT", f"{base}/{plural}/web", current)


# -- StatefulSets


def test_a_stateful_set_starts_its_pods_one_after_the_other_with_names_that_stay(cluster):
    make(cluster, "StatefulSet", APPS, "statefulsets", replicas=3, serviceName="web", template=pod_template())
    for expected in (["web-0"], ["web-0", "web-1"], ["web-0", "web-1", "web-2"]):
        cluster.sync()
        assert names(cluster) == expected
        cluster.run_all()
    settle(cluster)
    pod = cluster.get_pod("web-1")
    assert (pod["spec"]["hostname"], pod["spec"]["subdomain"]) == ("web-1", "web")
    assert pod["metadata"]["labels"]["apps.kubernetes.io/pod-index"] == "1"
    uid = pod["metadata"]["uid"]
    cluster.call("DELETE", "/api/v1/namespaces/default/pods/web-1")
    settle(cluster)
    assert cluster.get_pod("web-1")["metadata"]["uid"] != uid
    status = get(cluster, "statefulsets")["status"]
    assert (status["replicas"], status["readyReplicas"], status["currentReplicas"]) == (3, 3, 3)
    assert status["currentRevision"] == status["updateRevision"]
    assert len(cluster.list("resourceclaims")) == 3


def test_a_stateful_set_in_parallel_starts_all_and_scaling_down_takes_the_highest(cluster):
    more = {"podManagementPolicy": "Parallel", "template": pod_template()}
    make(cluster, "StatefulSet", APPS, "statefulsets", replicas=3, **more)
    cluster.sync()
    assert names(cluster) == ["web-0", "web-1", "web-2"]
    settle(cluster)
    change(cluster, "statefulsets", replicas=1)
    settle(cluster)
    assert names(cluster) == ["web-0"]
    assert len(cluster.list("resourceclaims")) == 1


def test_an_update_goes_from_the_highest_number_down_and_stops_at_the_partition(cluster):
    make(cluster, "StatefulSet", APPS, "statefulsets", replicas=3, template=pod_template())
    settle(cluster)
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"partition": 2}}
    change(cluster, "statefulsets", template=pod_template(image="v2"), updateStrategy=strategy)
    settle(cluster)
    assert images(cluster) == {"web-0": "v1", "web-1": "v1", "web-2": "v2"}
    status = get(cluster, "statefulsets")["status"]
    assert status["currentRevision"] != status["updateRevision"]
    cluster.call("DELETE", "/api/v1/namespaces/default/pods/web-0")
    settle(cluster)
    assert images(cluster)["web-0"] == "v1", "below the partition pods come back as they were"
    change(
        cluster, "statefulsets", updateStrategy={"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}
    )
    settle(cluster)
    assert set(images(cluster).values()) == {"v2"}
    status = get(cluster, "statefulsets")["status"]
    assert (status["currentRevision"], status["updatedReplicas"]) == (status["updateRevision"], 3)
    revisions = cluster.list("controllerrevisions")
    assert sorted(each["revision"] for each in revisions) == [1, 2]


@pytest.mark.parametrize("policy", ["OrderedReady", "Parallel"])
def test_a_broken_update_is_repaired_by_the_next_in_order_only_after_the_broken_pod_was_deleted(
    cluster, policy
):
    make(
        cluster, "StatefulSet", APPS, "statefulsets",
        replicas=2, podManagementPolicy=policy, template=pod_template(),
    )  # fmt: skip
    settle(cluster)
    change(cluster, "statefulsets", template=pod_template(image="v2", nodeSelector={"nowhere": "yes"}))
    settle(cluster)
    assert cluster.node_of("web-1") == ""
    change(cluster, "statefulsets", template=pod_template(image="v3"))
    settle(cluster)
    if policy == "OrderedReady":
        # As the real controller: it waits for the broken pod, for ever.
        assert images(cluster)["web-1"] == "v2"
        cluster.call("DELETE", "/api/v1/namespaces/default/pods/web-1")
        settle(cluster)
    assert images(cluster) == {"web-0": "v3", "web-1": "v3"}


def test_pods_of_a_stateful_set_have_volume_claims_of_their_own(cluster):
    claim = {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    make(
        cluster,
        "StatefulSet",
        APPS,
        "statefulsets",
        replicas=1,
        volumeClaimTemplates=[claim],
        template=pod_template(),
    )
    settle(cluster)
    found = cluster.call("GET", "/api/v1/namespaces/default/persistentvolumeclaims")["items"]
    assert [each["metadata"]["name"] for each in found] == ["data-web-0"]
    assert {"name": "data", "persistentVolumeClaim": {"claimName": "data-web-0"}} in cluster.get_pod("web-0")[
        "spec"
    ]["volumes"]


def test_a_deleted_stateful_set_takes_pods_and_revisions_with_it(cluster):
    make(cluster, "StatefulSet", APPS, "statefulsets", replicas=2, template=pod_template())
    settle(cluster)
    cluster.call("DELETE", f"{APPS}/statefulsets/web")
    settle(cluster)
    assert [cluster.list(plural) for plural in ("pods", "controllerrevisions", "resourceclaims")] == [
        [],
        [],
        [],
    ]


# -- Jobs


def finish(cluster, *pods, phase="Succeeded"):
    for pod in pods:
        cluster.end(pod["metadata"]["name"], phase)
    settle(cluster)


def running(cluster):
    return [pod for pod in cluster.list("pods") if pod["status"]["phase"] == "Running"]


def test_a_numbered_job_has_one_pod_for_each_number_and_repeats_a_failed_one(cluster):
    template = pod_template(restartPolicy="Never")
    make(
        cluster,
        "Job",
        BATCH,
        "jobs",
        completions=3,
        parallelism=2,
        completionMode="Indexed",
        template=template,
    )
    settle(cluster)
    key = "batch.kubernetes.io/job-completion-index"
    first, second = running(cluster)
    assert sorted(pod["metadata"]["annotations"][key] for pod in (first, second)) == ["0", "1"]
    assert first["spec"]["containers"][0]["env"][0]["name"] == "JOB_COMPLETION_INDEX"
    zero = next(pod for pod in (first, second) if pod["metadata"]["annotations"][key] == "0")
    finish(cluster, zero, phase="Failed")
    assert sorted(pod["metadata"]["annotations"][key] for pod in running(cluster)) == ["0", "1"]
    finish(cluster, *running(cluster))
    assert [pod["metadata"]["annotations"][key] for pod in running(cluster)] == ["2"]
    finish(cluster, *running(cluster))
    status = get(cluster, "jobs", BATCH)["status"]
    assert (status["completedIndexes"], status["succeeded"], status["failed"]) == ("0-2", 3, 1)
    assert status["conditions"][-1]["type"] == "Complete"


def test_a_job_that_runs_too_long_fails_and_its_pods_go(cluster, clock):
    make(
        cluster, "Job", BATCH, "jobs", activeDeadlineSeconds=60, template=pod_template(restartPolicy="Never")
    )
    settle(cluster)
    assert 50 < cluster.control.sync() <= 60 or cluster.control.sync() <= 5
    clock.now += 61
    settle(cluster)
    status = get(cluster, "jobs", BATCH)["status"]
    assert status["conditions"][-1]["reason"] == "DeadlineExceeded"
    assert not running(cluster)


def test_a_finished_job_goes_after_its_time_to_live(cluster, clock):
    make(
        cluster,
        "Job",
        BATCH,
        "jobs",
        ttlSecondsAfterFinished=30,
        template=pod_template(restartPolicy="Never"),
    )
    settle(cluster)
    finish(cluster, *running(cluster))
    assert get(cluster, "jobs", BATCH)["status"]["conditions"][-1]["type"] == "Complete"
    clock.now += 31
    settle(cluster)
    assert cluster.call("GET", f"{BATCH}/jobs")["items"] == []


@pytest.mark.parametrize(("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 5, 7, 8), "0-2,5,7-8")])
def test_numbers_are_written_as_spans(numbers, text):
    assert spans(numbers) == text


# -- CronJobs


def cron(cluster, schedule="*/5 * * * *", **spec):
    template = {"spec": {"template": pod_template(restartPolicy="Never")}}
    body = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "web"},
        "spec": {"schedule": schedule, "jobTemplate": template, **spec},
    }
    return cluster.call("POST", f"{BATCH}/cronjobs", body)


def jobs(cluster):
    return sorted(job["metadata"]["name"] for job in cluster.call("GET", f"{BATCH}/jobs")["items"])


def test_a_cron_job_makes_jobs_when_it_is_time_and_keeps_a_few(cluster, clock):
    cron(cluster, successfulJobsHistoryLimit=2)
    settle(cluster)
    assert jobs(cluster) == []
    made = []
    for _ in range(4):
        clock.now += 300
        settle(cluster)
        made += [job for job in jobs(cluster) if job not in made]
        finish(cluster, *running(cluster))
    first = int(START // 60) + 5
    assert made == [f"web-{first + 5 * i}" for i in range(4)]
    assert jobs(cluster) == made[-2:]
    status = get(cluster, "cronjobs", BATCH)["status"]
    assert status["lastScheduleTime"] == "2030-06-03T10:20:00Z"
    assert status["lastSuccessfulTime"] >= status["lastScheduleTime"]
    assert "active" not in status
    assert ("SuccessfulCreate", f"Created job {made[0]}") in cluster.events("web")


@pytest.mark.parametrize(("policy", "left"), [("Allow", 2), ("Forbid", 1), ("Replace", 1)])
def test_a_job_that_still_runs_is_joined_kept_or_replaced(cluster, clock, policy, left):
    cron(cluster, concurrencyPolicy=policy)
    settle(cluster)
    clock.now += 300
    settle(cluster)
    (first,) = jobs(cluster)
    clock.now += 300
    settle(cluster)
    assert len(jobs(cluster)) == left
    assert (first in jobs(cluster)) is (policy != "Replace")


def test_a_suspended_cron_job_rests_and_missed_times_count_once(cluster, clock):
    cron(cluster, suspend=True)
    clock.now += 3600
    settle(cluster)
    assert jobs(cluster) == []
    change(cluster, "cronjobs", BATCH, suspend=False)
    settle(cluster)
    assert len(jobs(cluster)) == 1


def test_a_deleted_cron_job_takes_its_jobs_and_pods_with_it(cluster, clock):
    cron(cluster)
    clock.now += 300
    settle(cluster)
    assert len(running(cluster)) == 1
    cluster.call("DELETE", f"{BATCH}/cronjobs/web")
    settle(cluster)
    assert (jobs(cluster), cluster.list("pods")) == ([], [])


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"schedule": "* * * *"}, "spec.schedule"),
        ({"schedule": "61 * * * *"}, "spec.schedule"),
        ({"timeZone": "Mars/Olympus"}, "spec.timeZone"),
        ({"concurrencyPolicy": "Maybe"}, "spec.concurrencyPolicy"),
        (
            {"jobTemplate": {"spec": {"template": pod_template()}}},
            "spec.jobTemplate.spec.template.spec.restartPolicy",
        ),
    ],
)
def test_a_wrong_cron_job_is_refused(cluster, spec, field):
    template = {"spec": {"template": pod_template(restartPolicy="Never")}}
    body = {
        "apiVersion": "batch/v1",
        "kind": "CronJob",
        "metadata": {"name": "web"},
        "spec": {"schedule": "@hourly", "jobTemplate": template, **spec},
    }
    status, answer = cluster.server.request("POST", f"{BATCH}/cronjobs", body)
    assert (status, [cause["field"] for cause in answer["details"]["causes"]]) == (422, [field])


def moments(schedule, count=3, zone=None, start="2030-06-03T10:00:30"):
    at, found = datetime.fromisoformat(start).replace(tzinfo=UTC).timestamp(), []
    for _ in range(count):
        at = parse_schedule(schedule, zone).after(at)
        found.append(datetime.fromtimestamp(at, UTC).strftime("%m-%dT%H:%M"))
    return found


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("*/20 * * * *", ["06-03T10:20", "06-03T10:40", "06-03T11:00"]),
        ("@daily", ["06-04T00:00", "06-05T00:00", "06-06T00:00"]),
        ("30 8-10/2 * * mon-wed", ["06-03T10:30", "06-04T08:30", "06-04T10:30"]),
        ("0 0 1 jan,jul *", ["07-01T00:00", "01-01T00:00", "07-01T00:00"]),
        ("0 0 13 * 5", ["06-07T00:00", "06-13T00:00", "06-14T00:00"]),
        ("0 12 * * 0", ["06-09T12:00", "06-16T12:00", "06-23T12:00"]),
    ],
)
def test_schedules(schedule, expected):
    assert moments(schedule) == expected


def test_a_schedule_in_a_time_zone():
    assert moments("0 9 * * *", 1, "America/New_York") == ["06-03T13:00"]


def test_a_day_that_never_comes_has_no_time():
    assert parse_schedule("0 0 30 2 *").after(START) is None


@pytest.mark.parametrize(
    "text",
    ["", "* * * * * *", "@fortnightly", "a * * * *", "5-1 * * * *", "*/0 * * * *", "@every x", "٣ * * * *"],
)
def test_what_is_no_schedule_is_refused(text):
    with pytest.raises(ScheduleError):
        parse_schedule(text)
