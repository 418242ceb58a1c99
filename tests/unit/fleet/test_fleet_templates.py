"""Claim templates for shares, made and collected in a simulated API server; and the election."""

from __future__ import annotations

import time

import pytest
from structlog.testing import capture_logs

from dra.api.fraction_pods import rewrite_pod
from dra.api.fractions import ANNOTATION, LABEL, Ask
from dra.errors import HostError
from dra.fleet.election import ElectionTimes, Elector, Lead
from dra.fleet.parts import Parts
from dra.fleet.process import Fleet, FleetSettings
from dra.fleet.templates import TemplateKeeper, wanted_by
from dra.kube.client import KubeClient
from dra.kube.clock import SystemClock
from dra.kube.connection import Connection, KubeOptions
from dra.sim.apiserver import SimApiServer

FIFTH, HALF = Ask(20, 100), Ask(50, 100)
QUICK = ElectionTimes(lease=1.0, renew=0.6, retry=0.05)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def api(tmp_path):
    server = SimApiServer()
    server.start()
    server.write_kubeconfig(tmp_path / "kubeconfig")
    server.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    yield server
    server.stop()


@pytest.fixture
def client(api, tmp_path):
    made = KubeClient(Connection(KubeOptions(kubeconfig=str(tmp_path / "kubeconfig"))))
    yield made
    made.close()


@pytest.fixture
def keeper(client):
    running = []

    def start(**options):
        made = TemplateKeeper(client, **options)
        made.start()
        running.append(made)
        return made

    yield start
    for each in running:
        each.stop(timeout_seconds=30)


def until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)
    return value


def pod(name, fraction="0.2", **metadata):
    from dra.api.fractions import FractionRules

    plain = {
        "metadata": {"name": name, **metadata},
        "spec": {
            "containers": [
                {"name": "main", "image": "x", "resources": {"limits": {"nvidia.com/gpu": fraction}}}
            ]
        },
    }
    return {"apiVersion": "v1", "kind": "Pod", **rewrite_pod(plain, FractionRules())}


def put(api, obj, namespace="team"):
    return api.create(f"/api/v1/namespaces/{namespace}/pods", obj)


def templates(api, namespace="team"):
    path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates"
    _, listed = api.request("GET", path)
    return {item["metadata"]["name"]: item for item in listed["items"]}


def test_a_template_is_made_in_each_namespace_whose_pods_name_it_once(api, keeper):
    keeper()
    put(api, pod("a"))
    put(api, pod("b"))
    put(api, pod("c", "0.5"))
    put(api, pod("d"), namespace="default")
    until(lambda: set(templates(api)) == {FIFTH.template_name, HALF.template_name})
    until(lambda: set(templates(api, "default")) == {FIFTH.template_name})
    made = templates(api)[FIFTH.template_name]
    assert made["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "dra-fleet"}
    (request,) = made["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["capacity"] == {"requests": {"shares": "20"}}
    assert request["exactly"]["deviceClassName"] == "gpu.nvidia.com"


def test_a_template_that_somebody_deleted_comes_back_while_a_pod_names_it(api, keeper):
    keeper()
    put(api, pod("a"))
    first = until(lambda: templates(api).get(FIFTH.template_name))
    api.request(
        "DELETE", f"/apis/resource.k8s.io/v1/namespaces/team/resourceclaimtemplates/{FIFTH.template_name}"
    )
    until(
        lambda: templates(api).get(FIFTH.template_name, first)["metadata"]["uid"] != first["metadata"]["uid"]
    )


def test_what_no_pod_names_is_collected_and_what_is_not_ours_stays(api, keeper):
    mine = {**FIFTH.template("team"), "metadata": {"name": "mine"}}
    api.create("/apis/resource.k8s.io/v1/namespaces/team/resourceclaimtemplates", mine)
    keeper(collect_seconds=0.0)
    put(api, pod("a"))
    until(lambda: FIFTH.template_name in templates(api))
    api.request("DELETE", "/api/v1/namespaces/team/pods/a?gracePeriodSeconds=0")
    until(lambda: set(templates(api)) == {"mine"})


def test_a_template_is_kept_for_a_while_after_its_last_pod(api, keeper):
    keeper(collect_seconds=3600.0)
    put(api, pod("a"))
    until(lambda: FIFTH.template_name in templates(api))
    api.request("DELETE", "/api/v1/namespaces/team/pods/a?gracePeriodSeconds=0")
    put(api, pod("b", "0.5"))
    until(lambda: HALF.template_name in templates(api))
    assert FIFTH.template_name in templates(api)


def test_a_pod_that_says_something_else_than_its_name_gets_nothing_and_is_told(api, keeper):
    class Events:
        def __init__(self):
            self.written = []

        def emit(self, about, type_, reason, message):
            self.written.append((about.name, type_, reason, message))

    events = Events()
    keeper(events=events)
    forged = pod("forged")
    forged["metadata"]["annotations"][ANNOTATION] = (
        f'{{"{FIFTH.template_name}": {{"shares": 100, "of": 100}}}}'
    )
    put(api, forged)
    put(api, pod("honest", "0.5"))
    until(lambda: HALF.template_name in templates(api))
    until(lambda: events.written)
    assert FIFTH.template_name not in templates(api)
    assert [(name, type_, reason) for name, type_, reason, _ in events.written] == [
        ("forged", "Warning", "ClaimTemplateRefused")
    ]
    assert "DRA-SHARE-CONTENT" in events.written[0][3]


@pytest.mark.parametrize(
    "change",
    [
        {"status": {"phase": "Succeeded"}},
        {"metadata": {"name": "p", "namespace": "team", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"spec": {"containers": [], "resourceClaims": []}},
    ],
)
def test_a_pod_that_has_ended_or_names_no_template_needs_none(change):
    asked = pod("p", namespace="team")
    assert wanted_by((asked,)).asks == {("team", FIFTH.template_name): FIFTH}
    assert wanted_by(({**asked, **change},)).asks == {}


# The election


class Reign:
    def __init__(self):
        self.events = []

    def lead(self, _lead):
        self.events.append("lead")

    def lost(self):
        self.events.append("lost")


@pytest.fixture
def elect(client):
    running = []

    def start(identity):
        reign = Reign()
        elector = Elector(
            client,
            namespace="team",
            name="fleet",
            identity=identity,
            on_lead=reign.lead,
            on_lost=reign.lost,
            times=QUICK,
        )
        elector.start()
        running.append(elector)
        return elector, reign

    yield start
    for elector in running:
        elector.stop(timeout_seconds=30)


def lease(api):
    return api.request("GET", "/apis/coordination.k8s.io/v1/namespaces/team/leases/fleet")[1]


def test_one_of_two_leads_and_the_other_follows_at_once_when_it_stops(api, elect):
    first, reign = elect("a")
    until(lambda: first.leading)
    second, other = elect("b")
    assert lease(api)["spec"]["holderIdentity"] == "a"
    first.stop(timeout_seconds=30)
    assert reign.events == ["lead", "lost"]
    until(lambda: second.leading)
    assert other.events == ["lead"]
    spec = lease(api)["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("b", 1)


def test_a_lease_whose_holder_is_gone_is_taken_over_when_it_is_old(api, elect):
    body = {
        "metadata": {"name": "fleet"},
        "spec": {
            "holderIdentity": "dead",
            "leaseDurationSeconds": 1,
            "renewTime": "2099-01-01T00:00:00.000000Z",
        },
    }
    api.create("/apis/coordination.k8s.io/v1/namespaces/team/leases", body)
    elector, _ = elect("a")
    until(lambda: elector.leading)


def test_who_cannot_renew_stops_working_and_comes_back(api, elect):
    elector, reign = elect("a")
    until(lambda: elector.leading)
    fault = api.faults.set("error", path="/leases", code=500)
    until(lambda: reign.events == ["lead", "lost"])
    assert elector.trouble
    api.faults.clear(fault)
    until(lambda: elector.leading)


def test_a_lease_that_somebody_else_wrote_is_his(api, elect):
    elector, reign = elect("a")
    until(lambda: elector.leading)

    def stolen():
        now = lease(api)
        now["spec"] |= {"holderIdentity": "thief", "leaseDurationSeconds": 3600}
        path = "/apis/coordination.k8s.io/v1/namespaces/team/leases/fleet"
        return api.request("PUT", path, now)[0] == 200

    until(stolen)
    until(lambda: reign.events == ["lead", "lost"])
    assert not elector.leading


def test_the_process_makes_templates_while_it_leads_and_answers_its_probes(api, tmp_path):
    import urllib.request

    fleet = Fleet(
        FleetSettings(
            identity="a", namespace="team", kubeconfig=str(tmp_path / "kubeconfig"), port=0, times=QUICK,
            collect_seconds=3600.0,
        )
    )  # fmt: skip
    fleet.start()
    try:
        put(api, pod("a"))
        until(lambda: FIFTH.template_name in templates(api))
        until(
            lambda: urllib.request.urlopen(f"http://127.0.0.1:{fleet.port}/readyz", timeout=30).status == 200
        )
    finally:
        fleet.stop()
    assert LABEL in pod("x")["metadata"]["labels"]
    assert not api.request("GET", "/apis/coordination.k8s.io/v1/namespaces/team/leases/dra-fleet")[1][
        "spec"
    ].get("holderIdentity")


class Part:
    def __init__(self, running):
        self.running = running

    def start(self):
        self.running.append(self)

    def stop(self):
        self.running.remove(self)


def test_a_part_that_does_not_start_is_tried_again_and_keeps_no_other_from_working(api, tmp_path):
    running, tries = [], []

    class Half(Part):
        """Starts, and then fails; what of it runs must not stay."""

        def start(self):
            super().start()
            raise HostError("DRA-HOST-NO-THREADS", "no thread could be started")

    def sick(_client, _events):
        tries.append(None)
        if len(tries) == 1:
            raise ValueError("a mistake of ours")
        return (Half if len(tries) == 2 else Part)(running)

    fleet = Fleet(
        FleetSettings(
            identity="a",
            namespace="team",
            kubeconfig=str(tmp_path / "kubeconfig"),
            times=QUICK,
            retry_seconds=0.05,
        ),
        parts=(sick, lambda _client, _events: Part(running)),
    )
    with capture_logs() as logs:
        fleet.start()
        try:
            until(lambda: len(running) == 2)
            assert len(tries) == 3
            assert [type(each) for each in running] == [Part, Part]
        finally:
            fleet.stop()
    assert running == []
    said = [each["event"] for each in logs if each["event"].startswith("part_")]
    assert said == ["part_not_started", "part_not_started", "part_started_at_last"]


def test_parts_end_when_the_lead_is_lost_and_are_made_anew_when_it_comes_back():
    running, made, leads = [], [], []
    first, second = (Lead("fleet", seconds=60.0, clock=SystemClock()) for _ in range(2))

    def make(lead):
        made.append(Part(running))
        leads.append(lead)
        return made[-1]

    parts = Parts([make, make])
    parts.start()
    try:
        parts.lead(first)
        until(lambda: len(running) == 2)
        parts.lost()
        assert running == []
        parts.lead(second)
        until(lambda: len(running) == 2)
        assert set(map(id, running)) == set(map(id, made[2:]))
    finally:
        parts.stop()
    assert running == []
    assert leads == [first, first, second, second]
