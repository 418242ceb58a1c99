"""`dra fleet` has the rights that it uses in the API, and no others."""

from __future__ import annotations

from dra.api.fractions import ANNOTATION
from dra.fleet.classes import ClassKeeper
from dra.fleet.copies import Copies
from dra.fleet.metrics import FleetMetrics
from dra.fleet.policy_status import PolicyStatus
from dra.fleet.process import COMPONENT, Fleet, FleetSettings
from dra.fleet.templates import TemplateKeeper
from dra.kube.events import ObjectReference
from tests.rights import granted, used
from tests.unit.fleet.test_fleet_policy_status import API, gpu_node, install, node, policy, slice_of
from tests.unit.fleet.test_fleet_policy_status import api as _api
from tests.unit.fleet.test_fleet_templates import QUICK, pod, put, templates, until

DRIVER = "gpu.nvidia.com"
CLASSES, SLICES = "/apis/resource.k8s.io/v1/deviceclasses", "/apis/resource.k8s.io/v1/resourceslices"
api = _api


class Eager:
    """What the process has, in a hurry: nothing is kept for a while before it goes."""

    def __init__(self, client, events):
        self.copies = Copies(client, driver=DRIVER)
        self.parts = [
            self.copies,
            TemplateKeeper(client, events=events, collect_seconds=0.0),
            PolicyStatus(
                client,
                driver=DRIVER,
                copies=self.copies,
                gather_seconds=0.05,
                sweep_seconds=0.0,
                gone_seconds=0.0,
            ),
            ClassKeeper(client, driver=DRIVER, copies=self.copies, look_seconds=0.05),
        ]

    def start(self):
        for each in self.parts:
            each.start()

    def stop(self):
        for each in self.parts:
            each.stop()


def test_the_role_grants_what_is_used_and_nothing_else(api, tmp_path):
    install(api)
    api.create("/api/v1/namespaces", {"metadata": {"name": "team"}})
    api.create("/api/v1/nodes", node("n"))
    made = policy()
    del made["metadata"]["generation"], made["metadata"]["creationTimestamp"]
    api.create(f"{API}/gpunodepolicies", made)
    api.create(f"{API}/gpunodes", {k: v for k, v in gpu_node("gone").items() if k != "status"})
    api.create(SLICES, slice_of("left", "gone"))
    cut = slice_of("cut", "n")
    cut["spec"]["devices"] = [
        {
            "name": "gpu-0-mig-1g10gb-19-0",
            "attributes": {"type": {"string": "mig"}, "profile": {"string": "1g.10gb"}},
        }
    ]
    api.create(SLICES, cut)
    put(api, pod("a"))
    wrong = pod("wrong")
    wrong["metadata"]["annotations"][ANNOTATION] = "nonsense"
    put(api, wrong)
    made = []

    def eager(client, events):
        made.append(Eager(client, events))
        return made[-1]

    fleet = Fleet(
        FleetSettings(identity="a", namespace="team", kubeconfig=str(tmp_path / "kubeconfig"), times=QUICK),
        parts=(eager,),
    )
    fleet.start()

    def names(path):
        return {each["metadata"]["name"]: each for each in api.request("GET", path)[1]["items"]}

    try:
        until(lambda: templates(api))
        until(lambda: "left" not in names(SLICES) and not names(f"{API}/gpunodes"))
        until(lambda: names(f"{API}/gpunodepolicies")["p"].get("status"))
        ours = until(lambda: names(CLASSES).get("mig-1g.10gb.nvidia.com"))
        # Somebody spoils it, and it is mended.
        ours["spec"]["selectors"] = []
        api.request("PUT", f"{CLASSES}/{ours['metadata']['name']}", ours)
        until(lambda: names(CLASSES)["mig-1g.10gb.nvidia.com"]["spec"].get("selectors"))
        api.request("DELETE", "/api/v1/namespaces/team/pods/a?gracePeriodSeconds=0")
        until(lambda: not templates(api))
        until(lambda: names("/api/v1/namespaces/team/events"))
        for _ in range(2):
            fleet.events.emit(ObjectReference("v1", "Node", "n", "u"), "Normal", "Said", "twice")
        until(lambda: any(e.get("count") == 2 for e in names("/api/v1/namespaces/default/events").values()))
        list(FleetMetrics(lambda: made[0].copies, driver=DRIVER)())
    finally:
        fleet.stop()
    assert used(api.requests.all(), COMPONENT) == granted("fleet.yaml")
