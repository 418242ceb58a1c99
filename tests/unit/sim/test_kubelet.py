"""The simulated kubelet keeps to the contract: registration, choice of versions, calls, checks, retries, wiping."""

from __future__ import annotations

import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dra.errors import DeviceError, KubeError
from dra.health.feed import DeviceCondition, HealthFeed
from dra.pb.registration_pb2 import PluginInfo, RegistrationStatusResponse
from dra.pb.services import (
    GET_INFO,
    NOTIFY_REGISTRATION_STATUS,
    PREPARE_V1,
    SUPPORTED_VERSIONS,
    UNPREPARE_V1,
)
from dra.plugin.call_pool import CallPool
from dra.plugin.endpoint import Endpoint
from dra.plugin.server import UnixServer, build_server
from dra.plugin.sockets import plan_sockets
from dra.sim.kubelet import KubeletVersion, PrepareError, SimKubelet, Timings, UnprepareError
from dra.sim.kubelet.registry import find_sockets
from tests.places import SHORT

DRIVER = "gpu.nvidia.com"
FAST = Timings(scan=0.02, first_back_off=0.05, wipe_delay=0.2, health_retry=0.1, reconcile=3600)


@dataclass(frozen=True)
class Prepared:
    request_names: tuple[str, ...] = ("gpu",)
    pool: str = "node-a"
    device: str = "gpu-0"
    cdi_ids: tuple[str, ...] = ()
    share_id: str | None = None


@dataclass
class Engine:
    """Prepares each claim with one device; `errors` fail by UID."""

    errors: dict = field(default_factory=dict)
    calls: list = field(default_factory=list)
    share_id: str | None = None

    def prepare(self, refs, within_seconds=None):
        self.calls.append(("prepare", sorted(ref.name for ref in refs)))
        return {
            ref.uid: self.errors.get(ref.uid)
            or (Prepared(cdi_ids=(f"k8s.gpu.nvidia.com/claim={ref.uid}-gpu-0",), share_id=self.share_id),)
            for ref in refs
        }

    def unprepare(self, refs):
        self.calls.append(("unprepare", sorted(ref.name for ref in refs)))
        return {ref.uid: self.errors.get(ref.uid) for ref in refs}


class Claims:
    """The API as the kubelet uses it: claims by name, and slices that can be wiped."""

    def __init__(self):
        self.claims = {}
        self.wiped = []
        self.wipe = threading.Condition()

    def get(self, resource, name, namespace=None):
        try:
            return self.claims[namespace, name]
        except KeyError:
            raise KubeError("DRA-API-NOT-FOUND", f"{name} not found", status=404) from None

    def delete_collection(self, resource, namespace=None, *, field_selector=""):
        with self.wipe:
            self.wiped.append(field_selector)
            self.wipe.notify_all()

    def wait_wiped(self, selector, timeout=60):
        with self.wipe:
            return self.wipe.wait_for(lambda: selector in self.wiped, timeout)

    def add(self, name, *, uid=None, pods=("pod-1",), driver=DRIVER, owner=None, allocated=True):
        allocation = {
            "devices": {
                "results": [{"driver": driver, "pool": "node-a", "device": "gpu-0", "request": "gpu"}]
            }
        }
        self.claims["default", name] = {
            "metadata": {
                "namespace": "default", "name": name, "uid": uid or f"uid-{name}",
                "ownerReferences": [{"uid": owner}] if owner else [],
            },
            "status": {
                "reservedFor": [{"resource": "pods", "name": pod, "uid": pod} for pod in pods],
                **({"allocation": allocation} if allocated else {}),
            },
        }  # fmt: skip


def pod(*claims, uid="pod-1", requests=None):
    return {
        "metadata": {"namespace": "default", "name": uid, "uid": uid},
        "spec": {
            "resourceClaims": [{"name": f"pc-{name}", "resourceClaimName": name} for name in claims],
            "containers": [
                {
                    "name": "main",
                    "resources": {
                        "claims": [
                            {"name": f"pc-{name}", **({"request": requests[name]} if requests else {})}
                            for name in claims
                        ]
                    },
                }
            ],
        },
        "status": {},
    }


@pytest.fixture
def root():
    path = Path(tempfile.mkdtemp(prefix="k", dir=SHORT))
    (path / "plugins_registry").mkdir()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def world(root):
    """A factory of kubelets and of plugin instances over one kubelet root."""

    class World:
        def __init__(self):
            self.api, self.ends = Claims(), []

        def kubelet(self, *, minor=36, timings=FAST):
            made = SimKubelet("node-a", root, self.api, slices=self.api, minor=minor, timings=timings)
            self.ends.append(made.stop)
            made.start()
            return made

        def plugin(self, engine=None, *, pod_uid="", feed=None):
            sockets = plan_sockets(
                DRIVER, plugins_dir=root / "plugins", registry_dir=root / "plugins_registry", pod_uid=pod_uid
            )
            made = Endpoint(DRIVER, sockets=sockets, engine=engine or Engine(), feed=feed or HealthFeed())
            self.ends.append(lambda: made.stop(grace_seconds=0))
            made.start()
            return made

    made = World()
    yield made
    for end in reversed(made.ends):
        end()


@pytest.fixture
def odd_plugin(root):
    """Serve raw answers: `odd_plugin(info, prepare=…)` with both services on one registration socket."""
    ends = []

    def make(
        *,
        endpoint=None,
        versions=SUPPORTED_VERSIONS,
        prepare=None,
        unprepare=None,
        kind="DRAPlugin",
        name=DRIVER,
    ):
        path = root / "plugins_registry" / f"{name}-reg.sock"
        told = []
        info = PluginInfo(type=kind, name=name, endpoint=endpoint or str(path), supported_versions=versions)

        def notify(request, _context):
            told.append((request.plugin_registered, request.error))
            return RegistrationStatusResponse()

        methods = [(GET_INFO, lambda _request, _context: info), (NOTIFY_REGISTRATION_STATUS, notify)]
        if prepare:
            methods.append((PREPARE_V1, lambda request, _context: prepare(request, PREPARE_V1.response())))
        if unprepare:
            methods.append(
                (UNPREPARE_V1, lambda request, _context: unprepare(request, UNPREPARE_V1.response()))
            )
        pool = CallPool("odd", threads=8)
        server = UnixServer(path, driver=name, build=lambda: build_server(methods, pool=pool))
        path.parent.mkdir(exist_ok=True)
        server.open()
        ends.append((server, pool))
        return told

    yield make
    for server, pool in ends:
        server.close(grace_seconds=0).wait()
        pool.shutdown()


def wait_for(condition, seconds=60.0):
    ticks = threading.Event()
    for _ in range(int(seconds / 0.01)):
        if condition():
            return True
        ticks.wait(0.01)
    return False


# --- registration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("minor", "prepare", "health"),
    [
        (32, "v1beta1.DRAPlugin", ""),
        (33, "v1beta1.DRAPlugin", ""),
        (34, "v1.DRAPlugin", ""),
        (36, "v1.DRAPlugin", "v1alpha1.DRAResourceHealth"),
        (37, "v1.DRAPlugin", "v1.DRAResourceHealth"),
    ],
)
def test_each_kubelet_speaks_the_newest_version_that_both_know(world, minor, prepare, health):
    world.plugin()
    connection = world.kubelet(minor=minor).wait_registered(DRIVER)
    assert (connection.prepare_version, connection.health_version) == (prepare, health)


def test_the_plugins_order_decides_and_not_the_kubelets():
    assert KubeletVersion(36).choose_prepare(["v1beta1.DRAPlugin", "v1.DRAPlugin"]) == "v1beta1.DRAPlugin"
    assert (
        KubeletVersion(37).choose_health(["v1alpha1.DRAResourceHealth", "v1.DRAResourceHealth"])
        == "v1.DRAResourceHealth"
    )


def test_a_plugin_that_lists_proto_packages_is_refused_and_told(world, odd_plugin):
    told = odd_plugin(versions=["k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin", "1.0.0"])
    kubelet = world.kubelet()
    assert wait_for(lambda: told)
    assert told[0][0] is False
    assert "none of the services are supported" in told[0][1]
    assert kubelet.connection(DRIVER) is None


def test_only_a_new_kubelet_refuses_an_endpoint_outside_its_root(world, odd_plugin):
    told = odd_plugin(endpoint="/run/elsewhere/dra.sock")
    world.kubelet(minor=37)
    assert wait_for(lambda: told)
    assert told[0][0] is False
    assert "/run/elsewhere/dra.sock is outside of" in told[0][1]


def test_a_refused_plugin_is_tried_again_with_growing_distance(world, odd_plugin):
    told = odd_plugin(kind="CSIPlugin")
    world.kubelet(timings=Timings(scan=0.005, first_back_off=0.02))
    assert wait_for(lambda: len(told) >= 4)
    assert all(not accepted and "no handler registered" in error for accepted, error in told)


def test_a_plugin_that_comes_after_the_kubelet_is_registered(world):
    kubelet = world.kubelet()
    world.plugin()
    assert kubelet.wait_registered(DRIVER).driver == DRIVER


def test_a_plugin_that_stops_is_deregistered_and_a_new_one_registered(world):
    kubelet = world.kubelet()
    first = world.plugin()
    kubelet.wait_registered(DRIVER)
    first.stop(grace_seconds=0)
    kubelet.wait_gone(DRIVER)
    world.plugin()
    assert kubelet.wait_registered(DRIVER)


def test_a_restarted_kubelet_finds_the_running_plugin(world):
    world.plugin()
    first = world.kubelet()
    first.wait_registered(DRIVER)
    first.stop()
    assert world.kubelet().wait_registered(DRIVER)


def test_an_instance_dialled_just_when_its_socket_was_replaced_is_waited_for_until_it_is_registered_anew(
    world, monkeypatch
):
    world.plugin()
    rounds = []

    def look(directory):
        found = find_sockets(directory)
        rounds.append(found)
        # The first round saw what stood there before.
        return found if len(rounds) > 1 else dict.fromkeys(found, (0, 0, 0))

    monkeypatch.setattr("dra.sim.kubelet.registry.find_sockets", look)
    kubelet = world.kubelet()
    connection = kubelet.wait_registered(DRIVER)
    seen = len(rounds)
    assert wait_for(lambda: len(rounds) > seen + 2)
    assert kubelet.connection(DRIVER) is connection


def test_another_instance_is_waited_for(world):
    kubelet = world.kubelet()
    old = world.plugin()
    before = kubelet.wait_registered(DRIVER)
    old.stop(grace_seconds=0)
    with pytest.raises(TimeoutError):
        kubelet.wait_registered(DRIVER, instead_of=before, timeout_seconds=0.1)
    world.plugin()
    after = kubelet.wait_registered(DRIVER, instead_of=before)
    assert after is not before
    assert kubelet.connection(DRIVER) is after


def test_of_two_instances_the_latest_is_called_and_after_its_end_the_other(world):
    kubelet = world.kubelet()
    old = world.plugin(pod_uid="0a1b2c3d-0000-4000-8000-000000000001")
    kubelet.wait_registered(DRIVER)
    new = world.plugin(pod_uid="0a1b2c3d-0000-4000-8000-000000000002")
    assert kubelet.wait_registered(DRIVER, instances=2).endpoint == str(new.sockets.service)
    new.stop(grace_seconds=0)
    assert wait_for(lambda: len(kubelet.registry.connections(DRIVER)) == 1)
    assert kubelet.connection(DRIVER).endpoint == str(old.sockets.service)


# --- slices -------------------------------------------------------------------------------------------------------


def test_a_starting_kubelet_wipes_the_slices_of_its_node(world):
    world.kubelet()
    assert world.api.wait_wiped("spec.nodeName=node-a")


def test_slices_are_wiped_after_the_last_instance_is_gone(world):
    kubelet = world.kubelet()
    plugin = world.plugin()
    kubelet.wait_registered(DRIVER)
    plugin.stop(grace_seconds=0)
    assert world.api.wait_wiped("spec.nodeName=node-a,spec.driver=gpu.nvidia.com")


def test_slices_stay_when_the_driver_is_back_within_the_delay(world):
    kubelet = world.kubelet(timings=Timings(scan=0.02, wipe_delay=3600))
    plugin = world.plugin()
    kubelet.wait_registered(DRIVER)
    plugin.stop(grace_seconds=0)
    kubelet.wait_gone(DRIVER)
    assert kubelet.wiper._timers
    world.plugin()
    kubelet.wait_registered(DRIVER)
    assert not kubelet.wiper._timers
    assert kubelet.wiper.wiped == [""]


# --- prepare and unprepare ----------------------------------------------------------------------------------------


def test_a_pods_claims_are_prepared_in_one_call_and_unprepared_at_its_end(world):
    engine = Engine()
    world.plugin(engine)
    kubelet = world.kubelet()
    kubelet.wait_registered(DRIVER)
    world.api.add("a")
    world.api.add("b")
    kubelet.run_pod(pod("a", "b"))
    assert kubelet.manager.cdi_ids(pod("a", "b"), pod("a", "b")["spec"]["containers"][0]) == [
        "k8s.gpu.nvidia.com/claim=uid-a-gpu-0",
        "k8s.gpu.nvidia.com/claim=uid-b-gpu-0",
    ]
    kubelet.stop_pod(pod("a", "b"))
    assert engine.calls == [("prepare", ["a", "b"]), ("unprepare", ["a", "b"])]


def test_a_claim_shared_by_two_pods_is_prepared_once_and_unprepared_with_the_last(world):
    engine = Engine()
    world.plugin(engine)
    kubelet = world.kubelet()
    kubelet.wait_registered(DRIVER)
    world.api.add("a", pods=("pod-1", "pod-2"))
    kubelet.run_pod(pod("a"))
    kubelet.run_pod(pod("a", uid="pod-2"))
    kubelet.stop_pod(pod("a"))
    assert engine.calls == [("prepare", ["a"])]
    kubelet.stop_pod(pod("a", uid="pod-2"))
    assert engine.calls == [("prepare", ["a"]), ("unprepare", ["a"])]


def test_a_container_gets_the_devices_of_its_request_only(world):
    world.plugin()
    kubelet = world.kubelet()
    kubelet.wait_registered(DRIVER)
    world.api.add("a")
    for request, count in (("gpu", 1), ("other", 0)):
        wanted = pod("a", requests={"a": request})
        kubelet.run_pod(wanted)
        assert len(kubelet.manager.cdi_ids(wanted, wanted["spec"]["containers"][0])) == count


def test_the_drivers_error_reaches_the_pod_and_the_next_attempt_may_succeed(world):
    engine = Engine(errors={"uid-b": DeviceError("DRA-DEVICE-HELD", "gpu-0 is held by claim x/y")})
    world.plugin(engine)
    kubelet = world.kubelet()
    kubelet.wait_registered(DRIVER)
    world.api.add("a")
    world.api.add("b")
    with pytest.raises(
        PrepareError, match="failed for ResourceClaim b: DRA-DEVICE-HELD: gpu-0 is held by claim x/y"
    ):
        kubelet.run_pod(pod("a", "b"))
    engine.errors.clear()
    kubelet.run_pod(pod("a", "b"))
    assert engine.calls == [("prepare", ["a", "b"])] * 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda api: api.claims.clear(), "fetch ResourceClaim a"),
        (lambda api: api.add("a", pods=("someone",)), "is not allowed to use"),
        (lambda api: api.add("a", allocated=False), "not allocated"),
        (
            lambda api: api.add("a", driver="other.example.com"),
            "DRA driver other.example.com is not registered",
        ),
    ],
    ids=["gone", "not reserved", "not allocated", "no driver"],
)
def test_nothing_is_called_or_remembered_for_a_claim_that_is_not_ready(world, change, why):
    engine = Engine()
    world.plugin(engine)
    kubelet = world.kubelet()
    kubelet.wait_registered(DRIVER)
    world.api.add("a")
    change(world.api)
    with pytest.raises(PrepareError, match=why):
        kubelet.run_pod(pod("a"))
    assert engine.calls == []
    assert kubelet.manager.cache.claims == {}


def test_a_claim_made_from_a_template_must_belong_to_the_pod(world):
    world.plugin()
    kubelet = world.kubelet()
    kubelet.wait_registered(DRIVER)
    made = pod("a")
    made["spec"]["resourceClaims"] = [{"name": "pc-a", "resourceClaimTemplateName": "t"}]
    with pytest.raises(PrepareError, match="not created yet"):
        kubelet.run_pod(made)
    made["status"]["resourceClaimStatuses"] = [{"name": "pc-a", "resourceClaimName": "a"}]
    world.api.add("a", owner="someone-else")
    with pytest.raises(PrepareError, match="was not created for pod"):
        kubelet.run_pod(made)
    world.api.add("a", owner="pod-1")
    kubelet.run_pod(made)


def test_a_claim_replaced_under_its_name_waits_for_the_old_one(world):
    engine = Engine()
    world.plugin(engine)
    kubelet = world.kubelet()
    kubelet.wait_registered(DRIVER)
    world.api.add("a")
    kubelet.run_pod(pod("a"))
    world.api.add("a", uid="uid-new", pods=("pod-2",))
    with pytest.raises(PrepareError, match="old ResourceClaim with same name a"):
        kubelet.run_pod(pod("a", uid="pod-2"))
    kubelet.pods.kill("pod-1")  # force-deleted
    kubelet.reconcile()
    kubelet.run_pod(pod("a", uid="pod-2"))
    assert engine.calls == [("prepare", ["a"]), ("unprepare", ["a"]), ("prepare", ["a"])]


def test_an_answer_without_a_claims_entry_fails_the_pod(world, odd_plugin):
    odd_plugin(prepare=lambda _request, response: response)
    kubelet = world.kubelet()
    kubelet.wait_registered(DRIVER)
    world.api.add("a")
    with pytest.raises(PrepareError, match="skipped 1 ResourceClaims"):
        kubelet.run_pod(pod("a"))


def test_an_answer_for_a_foreign_claim_fails_the_pod(world, odd_plugin):
    def answer(_request, response):
        response.claims["uid-stranger"].error = ""
        return response

    odd_plugin(prepare=answer, unprepare=answer)
    kubelet = world.kubelet()
    kubelet.wait_registered(DRIVER)
    world.api.add("a")
    with pytest.raises(PrepareError, match="unknown claim UID uid-stranger"):
        kubelet.run_pod(pod("a"))
    with pytest.raises(UnprepareError, match="unknown claim UID uid-stranger"):
        kubelet.stop_pod(pod("a"))


def test_a_pod_that_never_prepared_is_unprepared_as_well(world):
    engine = Engine(errors={"uid-a": DeviceError("DRA-X", "no")})
    world.plugin(engine)
    kubelet = world.kubelet()
    kubelet.wait_registered(DRIVER)
    world.api.add("a")
    with pytest.raises(PrepareError):
        kubelet.run_pod(pod("a"))
    engine.errors.clear()
    kubelet.stop_pod(pod("a"))
    assert engine.calls[-1] == ("unprepare", ["a"])
    assert kubelet.manager.cache.claims == {}


def test_a_pod_stays_while_its_unprepare_fails_or_the_driver_is_missing(world):
    engine = Engine()
    plugin = world.plugin(engine)
    kubelet = world.kubelet()
    kubelet.wait_registered(DRIVER)
    world.api.add("a")
    kubelet.run_pod(pod("a"))
    engine.errors["uid-a"] = DeviceError("DRA-BUSY", "in use")
    with pytest.raises(UnprepareError, match="DRA-BUSY: in use"):
        kubelet.stop_pod(pod("a"))
    plugin.stop(grace_seconds=0)
    kubelet.wait_gone(DRIVER)
    with pytest.raises(UnprepareError, match="is not registered"):
        kubelet.stop_pod(pod("a"))
    engine.errors.clear()
    world.plugin(engine)
    kubelet.wait_registered(DRIVER)
    kubelet.stop_pod(pod("a"))
    assert kubelet.manager.cache.claims == {}


def test_after_a_restart_a_pod_is_prepared_again_and_one_that_is_gone_is_unprepared(world):
    engine = Engine()
    world.plugin(engine)
    first = world.kubelet()
    first.wait_registered(DRIVER)
    world.api.add("a")
    world.api.add("b", pods=("pod-2",))
    first.run_pod(pod("a"))
    first.run_pod(pod("b", uid="pod-2"))
    first.stop()
    engine.calls.clear()
    second = world.kubelet()
    second.wait_registered(DRIVER)
    second.run_pod(pod("a"))
    second.reconcile()
    assert engine.calls == [("prepare", ["a"]), ("unprepare", ["b"])]


@pytest.mark.parametrize(("minor", "ids"), [(36, 2), (37, 1)])
def test_a_repeated_prepare_doubles_the_cdi_names_before_1_37_only(world, minor, ids):
    world.plugin()
    first = world.kubelet(minor=minor)
    first.wait_registered(DRIVER)
    world.api.add("a")
    first.run_pod(pod("a"))
    first.stop()
    second = world.kubelet(minor=minor)
    second.wait_registered(DRIVER)
    second.run_pod(pod("a"))
    assert len(second.manager.cdi_ids(pod("a"), pod("a")["spec"]["containers"][0])) == ids


def test_the_share_id_is_remembered_in_v1_and_unknown_in_v1beta1(world):
    world.plugin(Engine(share_id="s-1"))
    world.api.add("a")
    for minor, expected in ((36, "s-1"), (33, None)):
        kubelet = world.kubelet(minor=minor)
        kubelet.wait_registered(DRIVER)
        kubelet.run_pod(pod("a"))
        (device, *_) = kubelet.manager.cache.claims["default", "a"].devices
        assert device.share_id == expected
        kubelet.stop_pod(pod("a"))
        kubelet.stop()


# --- health -------------------------------------------------------------------------------------------------------


def test_health_is_streamed_and_dropped_with_the_stream(world):
    feed = HealthFeed()
    feed.publish((DeviceCondition("node-a", "gpu-0"),))
    plugin = world.plugin(feed=feed)
    kubelet = world.kubelet()
    kubelet.wait_health(DRIVER, lambda c: c.health_of("node-a", "gpu-0") == ("Healthy", ""))
    feed.publish((DeviceCondition("node-a", "gpu-0", "Unhealthy", "XID 79"),))
    connection = kubelet.wait_health(
        DRIVER, lambda c: c.health_of("node-a", "gpu-0") == ("Unhealthy", "XID 79")
    )
    assert connection.health_of("node-a", "gpu-1") == ("Unknown", "")
    plugin.stop(grace_seconds=0)
    assert wait_for(lambda: connection.health_of("node-a", "gpu-0") == ("Unknown", ""))
