"""Client and publisher against a real kube-apiserver: what a simulated one can only imitate.

Runs where `KUBEBUILDER_ASSETS` names a directory with etcd and kube-apiserver (about 20 s), else skips.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dra.controller.dropped import DroppedFields
from dra.controller.publisher import Publisher
from dra.errors import KubeError
from dra.kube.client import KubeClient, connect
from dra.kube.connection import KubeOptions
from dra.kube.events import EventRecorder, ObjectReference
from dra.kube.failures import Call
from dra.kube.reflector import Reflector
from dra.kube.resources import (
    DEVICE_CLASSES,
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    Resource,
)
from tests.real_apiserver import RealApiServer, needs_real_apiserver, real_apiserver
from tests.unit.controller.pools import DRIVER, NODE, Part, Pool, gpu, pool, pools, visible

pytestmark = [pytest.mark.real, needs_real_apiserver]

MANIFESTS = Path(__file__).parents[2] / "deploy" / "manifests"
PLUGIN = "dra-driver-nvidia-gpu-service-account-kubeletplugin"
NAMESPACE = "dra-driver-nvidia-gpu"
TAINT = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}
# What a kubelet deletes by when it starts.
KUBELET_WIPE = f"spec.nodeName={NODE}"


def until(condition: Callable[[], object], seconds: float = 15.0) -> float:
    """Wait; give how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "the expected state did not come"
        time.sleep(0.01)
    return time.monotonic() - began


def slices(client: KubeClient) -> list[dict]:
    return list(client.list(RESOURCE_SLICES, field_selector=f"spec.driver={DRIVER}").items)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealApiServer]:
    with real_apiserver(tmp_path_factory.mktemp("apiserver"), users={"nobody": []}) as running:
        yield running


@pytest.fixture(scope="module")
def old_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealApiServer]:
    """A server with the gates off that were off before 1.36."""
    gates = [f"{g}=false" for g in ("DRADeviceTaints", "DRAPartitionableDevices", "DRAConsumableCapacity")]
    with real_apiserver(tmp_path_factory.mktemp("old"), gates=gates) as running:
        yield running


def client_of(running: RealApiServer) -> KubeClient:
    return connect(KubeOptions(kubeconfig=str(running.admin_kubeconfig)))


def speaking(running: RealApiServer, version: str) -> KubeClient:
    """Give a client that believes that the server has only this version: 1.36 does not start without v1."""
    made = client_of(running)
    made._sender.negotiation._served["resource.k8s.io"] = (time.monotonic(), frozenset({version}))
    return made


@pytest.fixture
def client(server: RealApiServer) -> Iterator[KubeClient]:
    made = client_of(server)
    _make_node(made)
    yield made
    for obj in made.list(RESOURCE_SLICES).items:
        made.delete(RESOURCE_SLICES, obj["metadata"]["name"])
    made.close()


def _make_node(client: KubeClient) -> str:
    try:
        return str(client.get(NODES, NODE)["metadata"]["uid"])
    except KubeError:
        return str(client.create(NODES, {"metadata": {"name": NODE}})["metadata"]["uid"])


@pytest.fixture
def publishing(client: KubeClient) -> Iterator[Callable[..., Publisher]]:
    started: list[Publisher] = []

    def start(desired: Pool | None, *, with_client: KubeClient | None = None, **options: object) -> Publisher:
        publisher = Publisher(with_client or client, NODE, DRIVER, **options)
        started.append(publisher)
        if desired is not None:
            publisher.set_desired(desired)
        publisher.start()
        return publisher

    yield start
    for publisher in started:
        assert publisher.stop()


def a_rich_pool() -> Pool:
    """Counters in a slice of their own; devices with every field that this driver uses."""
    counters = [{"name": f"gpu-{n}-counters", "counters": {"memory": {"value": "81920Mi"}}} for n in range(2)]
    devices = [
        gpu(
            f"gpu-{n}",
            consumesCounters=[
                {"counterSet": f"gpu-{n}-counters", "counters": {"memory": {"value": "81920Mi"}}}
            ],
            taints=[TAINT] if n else [],
            allowMultipleAllocations=True,
            capacity={
                "memory": {
                    "value": "81920Mi",
                    "requestPolicy": {"default": "1Gi", "validRange": {"min": "1Gi"}},
                }
            },
        )
        for n in range(2)
    ]
    return Pool((Part(shared_counters=counters), Part(devices)))


class TestPublisher:
    def test_a_pool_with_every_kind_of_field_is_stored_as_sent_and_written_once(
        self, client, publishing
    ) -> None:
        publisher = publishing(a_rich_pool())
        until(lambda: publisher.ready)
        assert publisher.status().dropped.fields == ()
        assert publisher.status().last_error is None
        assert visible(slices(client)) == (1, ["gpu-0", "gpu-1"])
        before = {obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in slices(client)}
        time.sleep(1.0)
        again = Publisher(client, NODE, DRIVER)
        again.set_desired(a_rich_pool())
        publisher.stop()
        again.start()
        until(lambda: again.ready)
        assert again.stop()
        assert {
            obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in slices(client)
        } == before
        assert again.status().writes == 0

    def test_the_first_pool_is_there_soon_after_the_start(self, server, client, publishing) -> None:
        fresh = client_of(server)
        took = until(lambda p=publishing(pool("gpu-0"), with_client=fresh): p.ready)
        assert took < 2.0

    def test_a_kubelet_that_starts_wipes_the_slices_and_they_are_back_within_two_seconds(
        self, client, publishing
    ) -> None:
        wanted = pools([gpu("gpu-0")], [gpu("gpu-1")], [gpu("gpu-2")])
        publisher = publishing(wanted)
        until(lambda: publisher.ready)
        for round_ in range(1, 4):
            client.delete_collection(RESOURCE_SLICES, field_selector=KUBELET_WIPE)
            took = until(lambda: visible(slices(client)) == (1, ["gpu-0", "gpu-1", "gpu-2"]))
            assert took < 2.0
            until(lambda n=round_: publisher.status().restores == n)

    def test_an_edit_by_hand_is_undone_and_the_editor_is_named(self, client, publishing) -> None:
        publisher = publishing(pool("gpu-0", "gpu-1"))
        until(lambda: publisher.ready)
        (stored,) = slices(client)
        edited = copy.deepcopy(stored)
        edited["spec"]["devices"] = edited["spec"]["devices"][:1]
        client.replace(RESOURCE_SLICES, stored["metadata"]["name"], edited)
        until(lambda: publisher.status().restores == 1)
        assert visible(slices(client)) == (1, ["gpu-0", "gpu-1"])

    def test_a_change_of_many_slices_is_never_seen_half_done(self, client, publishing) -> None:
        sizes = {"gpu-1": [["gpu-1"], ["gpu-2"], ["gpu-3"]], "gpu-5": [["gpu-5"], ["gpu-6"]]}
        whole = [[name for part in parts for name in part] for parts in sizes.values()]
        publisher = publishing(pools(*[[gpu(n) for n in part] for part in sizes["gpu-1"]]))
        until(lambda: publisher.ready)
        seen: list[list[str]] = []
        copy_of_scheduler: dict[str, dict] = {}

        def scheduler(change) -> None:
            name = change.object["metadata"]["name"]
            if change.type == "deleted":
                copy_of_scheduler.pop(name, None)
            else:
                copy_of_scheduler[name] = change.object
            view = visible(list(copy_of_scheduler.values()))
            if view is not None:
                seen.append(view[1])

        reflector = Reflector(client, RESOURCE_SLICES, on_change=scheduler)
        reflector.start()
        assert reflector.synced.wait(5)
        for key in ("gpu-5", "gpu-1", "gpu-5"):
            publisher.set_desired(pools(*[[gpu(n) for n in part] for part in sizes[key]]))
            until(lambda: publisher.ready)
        generation = publisher.status().generation
        until(lambda: seen and seen[-1] == whole[1])
        assert reflector.stop()
        assert generation == 4
        assert all(view in whole for view in seen), seen

    def test_the_time_of_a_taint_stays_through_updates_and_wipes(self, client, publishing) -> None:
        publisher = publishing(pools([gpu("gpu-0", taints=[TAINT])]))
        until(lambda: publisher.ready)
        added = slices(client)[0]["spec"]["devices"][0]["taints"][0]["timeAdded"]
        time.sleep(1.1)  # the time has whole seconds
        publisher.set_desired(pools([gpu("gpu-0", taints=[TAINT]), gpu("gpu-1")]))
        until(lambda: publisher.ready)
        assert slices(client)[0]["spec"]["devices"][0]["taints"][0]["timeAdded"] == added
        client.delete_collection(RESOURCE_SLICES, field_selector=KUBELET_WIPE)
        until(lambda: slices(client))
        assert slices(client)[0]["spec"]["devices"][0]["taints"][0]["timeAdded"] == added

    def test_what_the_server_refuses_is_left_out_and_reported_and_the_rest_is_published(
        self, client, publishing
    ) -> None:
        bad = [
            gpu("gpu-0"),
            gpu("gpu-1", attributes={"type": {"string": "gpu"}, "long": {"string": "x" * 65}}),
            gpu("gpu-2", attributes={"type": {"string": "gpu"}, "driver-version": {"string": "1"}}),
            gpu("gpu-3", attributes={"type": {"string": "gpu"}, "version": {"version": "580.65.06"}}),
            {**gpu("gpu-4"), "name": "GPU_4"},
            gpu("gpu-5", capacity={"memory": {"value": "1", "requestPolicy": {"default": "1"}}}),
            gpu("gpu-6", attributes={f"a{n}": {"int": n} for n in range(40)}),
        ]
        publisher = publishing(pools(bad))
        until(lambda: publisher.ready)
        (stored,) = slices(client)
        assert [d["name"] for d in stored["spec"]["devices"]] == [
            "gpu-0",
            "gpu-1",
            "gpu-2",
            "gpu-3",
            "gpu-5",
            "gpu-6",
        ]
        assert all(d["attributes"].keys() == {"type"} for d in stored["spec"]["devices"][1:4])
        refused = {(r.device, r.part, r.name) for r in publisher.status().refused}
        assert {
            ("gpu-1", "attributes", "long"), ("gpu-2", "attributes", "driver-version"), ("gpu-3", "attributes", "version"),
            ("GPU_4", "device", "GPU_4"), ("gpu-5", "capacity", "memory"), ("gpu-6", "attributes", "a39"),
        } <= refused  # fmt: skip
        assert publisher.status().last_error.code == "DRA-SLICE-REFUSED"

    def test_more_devices_than_a_slice_takes_with_taints_are_split(self, client, publishing) -> None:
        many = [gpu(f"gpu-{n}", taints=[TAINT] if n == 3 else []) for n in range(100)]
        publisher = publishing(pools(many))
        until(lambda: publisher.ready)
        assert visible(slices(client)) == (1, [device["name"] for device in many])
        assert len(slices(client)) == 2

    def test_a_node_made_again_under_its_name_owns_the_slices_anew(self, client, publishing) -> None:
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready)
        old = slices(client)[0]["metadata"]["ownerReferences"][0]["uid"]
        client.delete(NODES, NODE)
        new = _make_node(client)
        assert new != old
        client.delete_collection(RESOURCE_SLICES, field_selector=KUBELET_WIPE)
        until(lambda: slices(client))
        assert slices(client)[0]["metadata"]["ownerReferences"][0]["uid"] == new

    @pytest.mark.parametrize("version", ["v1beta1", "v1beta2", "v1"])
    def test_the_gates_that_are_off_are_told_once_in_every_version(self, old_server, version) -> None:
        old = speaking(old_server, version)
        _make_node(old)
        told: list[DroppedFields] = []
        publisher = Publisher(old, NODE, DRIVER, on_dropped=told.append)
        publisher.set_desired(pools([gpu("gpu-0", taints=[TAINT], allowMultipleAllocations=True)]))
        publisher.start()
        try:
            until(lambda: publisher.ready)
            assert old.served_version(RESOURCE_SLICES) == version
            stored = slices(old)[0]
            assert stored["spec"]["devices"][0]["attributes"]["type"] == {"string": "gpu"}
            assert [dropped.gates for dropped in told] == [("DRAConsumableCapacity", "DRADeviceTaints")]
            time.sleep(0.8)
            assert slices(old)[0]["metadata"]["resourceVersion"] == stored["metadata"]["resourceVersion"], (
                "no loop"
            )
        finally:
            assert publisher.stop()
            old.delete(RESOURCE_SLICES, f"00000-{DRIVER}-{NODE}")

    def test_an_api_server_that_crashes_and_comes_back_gets_the_new_pool_within_three_seconds(
        self, server, client, publishing
    ) -> None:
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready)
        server.kill_apiserver()
        publisher.set_desired(pool("gpu-0", "gpu-1"))
        until(lambda: publisher.status().failures >= 2)
        assert publisher.status().last_error.code == "DRA-API-UNREACHABLE"
        server.start_apiserver()
        took = until(lambda: publisher.ready)
        assert took < 3.0
        assert visible(slices(client)) == (1, ["gpu-0", "gpu-1"])

    def test_an_api_server_that_freezes_costs_time_limits_and_nothing_else(
        self, server, client, publishing
    ) -> None:
        publisher = publishing(pool("gpu-0"))
        until(lambda: publisher.ready)
        client.create(NAMESPACES, {"metadata": {"name": "frozen"}})
        server.freeze()
        try:
            began = time.monotonic()
            with pytest.raises(KubeError) as caught:
                client.get(RESOURCE_CLAIMS, "c", "frozen", timeout_seconds=0.5)
            assert caught.value.code == "DRA-API-TIMEOUT"
            assert time.monotonic() - began < 3.0
            publisher.set_desired(pool("gpu-0", "gpu-1"))
        finally:
            server.thaw()
        until(lambda: publisher.ready)
        assert visible(slices(client)) == (1, ["gpu-0", "gpu-1"])


class TestRights:
    """The manifests of this repository give the plugin what it needs, on its own node and no other."""

    def test_the_shipped_role_and_policy_are_enough_for_the_own_node_and_for_no_other(
        self, server, client, publishing
    ) -> None:
        _apply_manifests(client, "rbac.yaml", "admission-policy.yaml")
        token = _bound_token(client)
        mine = connect(KubeOptions(kubeconfig=str(server.kubeconfig_for("plugin", token=token))))
        # Policies take a moment to be in force.
        until(lambda: _refusal_of(mine, "other-node") is not None)
        publisher = publishing(pool("gpu-0"), with_client=mine)
        until(lambda: publisher.ready)
        publisher.set_desired(pools([gpu("gpu-1")], [gpu("gpu-2")]))
        until(lambda: publisher.ready)
        publisher.set_desired(pools([gpu("gpu-3")]))
        until(lambda: publisher.ready)
        assert visible(slices(client)) == (3, ["gpu-3"])
        assert publisher.status().watch_error is None
        error = _refusal_of(mine, "other-node")
        assert error.status in (403, 422)
        assert "may not change a slice of node 'other-node'" in error.message

    def test_without_a_role_the_missing_right_is_named(self, server, client) -> None:
        nobody = connect(KubeOptions(kubeconfig=str(server.kubeconfig_for("nobody"))))
        with pytest.raises(KubeError) as caught:
            nobody.list(RESOURCE_SLICES)
        assert caught.value.code == "DRA-API-FORBIDDEN"
        assert (
            'Give nobody the verb "list" on "resourceslices" in API group "resource.k8s.io"'
            in caught.value.remedy
        )


class TestClient:
    CLAIM = {
        "metadata": {"name": "c"},
        "spec": {
            "devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]}
        },
    }

    def test_a_claim_looks_the_same_in_every_version(self, server, client) -> None:
        for made in (client, speaking(server, "v1beta1"), speaking(server, "v1beta2")):
            claim = made.create(RESOURCE_CLAIMS, self.CLAIM, "default")
            assert claim["spec"]["devices"]["requests"][0]["exactly"]["count"] == 1
            found = made.get(RESOURCE_CLAIMS, "c", "default")
            assert found["spec"] == claim["spec"]
            made.delete(RESOURCE_CLAIMS, "c", "default", uid=claim["metadata"]["uid"])

    def test_apply_gives_the_object_also_when_it_creates_it(self, client) -> None:
        body = {"metadata": {"name": "applied"}, "spec": {"selectors": [{"cel": {"expression": "true"}}]}}
        first = client.apply(DEVICE_CLASSES, "applied", body)
        assert first["metadata"]["uid"]
        body["spec"]["extendedResourceName"] = "nvidia.com/gpu"
        assert (
            client.apply(DEVICE_CLASSES, "applied", body)["spec"]["extendedResourceName"] == "nvidia.com/gpu"
        )
        client.delete(DEVICE_CLASSES, "applied")

    def test_a_dry_run_stores_nothing_and_a_stale_write_is_a_conflict(self, client) -> None:
        body = {"metadata": {"name": "dry"}, "spec": {"selectors": []}}
        client.create(DEVICE_CLASSES, body, dry_run=True)
        with pytest.raises(KubeError) as missing:
            client.get(DEVICE_CLASSES, "dry")
        assert missing.value.code == "DRA-API-NOT-FOUND"
        stored = client.create(DEVICE_CLASSES, body)
        client.patch(DEVICE_CLASSES, "dry", {"metadata": {"labels": {"a": "b"}}})
        with pytest.raises(KubeError) as stale:
            client.replace(
                DEVICE_CLASSES, "dry", {**stored, "spec": {"selectors": [{"cel": {"expression": "true"}}]}}
            )
        assert (stale.value.code, stale.value.reason) == ("DRA-API-CONFLICT", "Conflict")
        client.delete(DEVICE_CLASSES, "dry")

    def test_a_watch_of_a_real_server_is_interrupted_at_once_over_tls(self, client) -> None:
        reflector = Reflector(client, RESOURCE_SLICES)
        reflector.start()
        assert reflector.synced.wait(5)
        time.sleep(0.2)
        began = time.monotonic()
        assert reflector.stop(timeout_seconds=5)
        assert time.monotonic() - began < 1.0

    def test_events_are_written_and_counted(self, client) -> None:
        claim = client.create(RESOURCE_CLAIMS, self.CLAIM, "default")
        about = ObjectReference(
            "resource.k8s.io/v1", "ResourceClaim", "c", claim["metadata"]["uid"], "default"
        )
        recorder = EventRecorder(client, component=DRIVER, host=NODE)
        for _ in range(3):
            recorder.emit(about, "Warning", "PrepareFailed", "DRA-DEVICE-HELD: gpu-0 is held")
        recorder.stop(timeout_seconds=10)
        found = client.list(EVENTS, "default", field_selector="involvedObject.name=c").items
        assert [(event["reason"], event["count"]) for event in found] == [("PrepareFailed", 3)]
        client.delete(RESOURCE_CLAIMS, "c", "default")


def _refusal_of(client: KubeClient, node: str) -> KubeError | None:
    spec = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
    }
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "probe"},
        "spec": spec,
    }
    try:
        client.create(RESOURCE_SLICES, body, dry_run=True)
    except KubeError as error:
        return error
    return None


def _apply_manifests(client: KubeClient, *names: str) -> None:
    yaml = pytest.importorskip("yaml")
    for name in names:
        for body in yaml.safe_load_all((MANIFESTS / name).read_text()):
            group, _, version = body["apiVersion"].rpartition("/")
            kind = body["kind"]
            plural = f"{kind.lower()[:-1]}ies" if kind.endswith("y") else f"{kind.lower()}s"
            resource = Resource(group, (version,), plural, kind, namespaced="namespace" in body["metadata"])
            client.apply(resource, body["metadata"]["name"], body, body["metadata"].get("namespace"))


def _bound_token(client: KubeClient) -> str:
    """Give a token as the kubelet projects it into a pod of the plugin on the node."""
    body = {
        "metadata": {"name": "plugin", "namespace": NAMESPACE},
        "spec": {"nodeName": NODE, "serviceAccountName": PLUGIN, "containers": [{"name": "c", "image": "i"}]},
    }
    plugin = client.apply(PODS, "plugin", body, NAMESPACE)
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "expirationSeconds": 3600,
            "boundObjectRef": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": "plugin",
                "uid": plugin["metadata"]["uid"],
            },
        },
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{PLUGIN}/token"
    answer = client._sender.exchange(
        Call("create", "serviceaccounts/token"), "POST", path, body=request, read_seconds=5.0
    )
    return str(answer["status"]["token"])
