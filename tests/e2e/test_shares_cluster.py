"""Shares and fractions end to end: webhook, fleet, scheduler, the real driver, and what the containers see."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import yaml

from dra.fleet.election import ElectionTimes
from dra.fleet.process import Fleet, FleetSettings
from dra.sim.cluster import SimCluster, read_manifests
from dra.values import Quantity
from dra.webhook.certificate import Certificate
from dra.webhook.server import WebhookServer
from tests.places import SHORT

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "manifests"
TLS = ROOT / "tests" / "data" / "tls"
L4_MIB = 23034


@pytest.fixture
def root():
    """A short path: sockets."""
    made = Path(tempfile.mkdtemp(prefix="dsh", dir=SHORT))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def webhook():
    server = WebhookServer(Certificate(TLS / "server.crt", TLS / "server.key"), host="127.0.0.1")
    server.start()
    yield server
    server.stop()


class Cluster:
    """A cluster with everything that deploy/manifests has for shares."""

    def __init__(self, root, webhook, *, sharing, nodes, **options):
        self.sim = SimCluster(
            root / "c", nodes, plugin_arguments=("--sharing", sharing), real=len(nodes), **options
        )
        self._webhook = webhook
        self.fleet = None

    def __enter__(self):
        self.sim.__enter__()
        try:
            return self._fill()
        except BaseException:
            self.__exit__()
            raise

    def _fill(self):
        self.sim.wait_ready(timeout_seconds=90)
        self.sim.apply(MANIFESTS / "deviceclasses.yaml")
        self._install_webhook()
        self.fleet = Fleet(
            FleetSettings(
                identity="a", namespace="default", kubeconfig=str(self.sim.kubeconfig), collect_seconds=0.5,
                times=ElectionTimes(lease=2.0, renew=1.5, retry=0.1),
            )
        )  # fmt: skip
        self.fleet.start()
        return self

    def __exit__(self, *problem):
        if self.fleet is not None:
            self.fleet.stop()
        self.sim.stop()

    def _install_webhook(self):
        """Install the configurations as they are shipped; only the certificate's names and authority are the tests'."""
        bundle = base64.b64encode((TLS / "server.crt").read_bytes()).decode()
        documents = list(read_manifests([MANIFESTS / "webhook-configuration.yaml"]))
        for document in documents:
            for hook in document["webhooks"]:
                hook["clientConfig"]["caBundle"] = bundle
                hook["timeoutSeconds"] = 30  # a busy machine is no matter here
                hook["clientConfig"]["service"] |= {"namespace": "hooks", "name": "webhook"}
        file = self.sim.root / "webhook.yaml"
        file.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
        self.sim.apply(file)
        self.sim.api.serve_service("hooks", "webhook", "127.0.0.1", self._webhook.port)

    def create(self, path, obj):
        return self.sim.api.request("POST", path, obj)

    def namespace(self, name):
        labels = {"gpudra.dev/fractions": "enabled"}
        status, answer = self.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
        assert status == 201, answer

    def pod(self, namespace, name="pod", limits=None, **spec):
        container = {
            "name": "main",
            "image": "ubuntu:22.04",
            "resources": {"limits": limits or {"nvidia.com/gpu": "0.2"}},
        }
        obj = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"containers": [container], "restartPolicy": "Never", **spec},
        }  # fmt: skip
        status, answer = self.create(f"/api/v1/namespaces/{namespace}/pods", obj)
        assert status == 201, answer
        return answer

    def running(self, count, **labels):
        def found():
            pods = [each for each in self.sim.pods() if each["status"].get("phase") == "Running"]
            return pods if len(pods) >= count else None

        return self.sim.until(found, f"{count} pods to run", timeout_seconds=90)

    def view(self, pod):
        """Give what the pod's container sees."""
        uid = pod["metadata"]["uid"]
        (found,) = [
            run for node in self.sim.nodes.values() if (run := node.kubelet.pods.get(uid)) is not None
        ]
        return found.views["main"]

    def waiting(self, name):
        def reason():
            (pod,) = [each for each in self.sim.pods() if each["metadata"]["name"] == name]
            conditions = {item["type"]: item for item in pod["status"].get("conditions") or []}
            message = str(conditions.get("PodScheduled", {}).get("message", ""))
            return message if message.startswith("0/") else ""

        return self.sim.until(reason, f"pod {name} to be told why it waits", timeout_seconds=60)

    def consumed(self):
        """Give, by device, the sum of what all claims consume."""
        sums = {}
        for claim in self.sim.claims():
            for result in claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ()):
                amounts = sums.setdefault(result["device"], Counter())
                amounts["shares"] += int(result["consumedCapacity"]["shares"])
        return sums


def allocated(cluster):
    return {
        claim["metadata"]["namespace"]: claim["status"]["allocation"]["devices"]["results"][0]
        for claim in cluster.sim.claims()
        if claim.get("status", {}).get("allocation")
    }


def test_five_fifths_from_five_namespaces_lie_on_one_card_the_sixth_elsewhere_and_a_whole_card_waits(
    root, webhook
):
    with Cluster(root, webhook, sharing="NVIDIA-L4=100", nodes=[("n", "a100-l4")]) as cluster:
        for number in range(5):
            cluster.namespace(f"team-{number}")
            cluster.pod(f"team-{number}")
        pods = cluster.running(5)
        first = allocated(cluster)
        assert len({each["device"] for each in first.values()}) == 1
        assert len({each["shareID"] for each in first.values()}) == 5
        (card,) = {each["device"] for each in first.values()}
        assert cluster.consumed() == {card: {"shares": 100}}
        # What a container is told, and what it has, is what was asked for.
        for pod in pods:
            view = cluster.view(pod)
            assert view.env["GPUDRA_SHARE_PERCENT"] == "20"
            assert int(view.env["GPUDRA_SHARE_MEMORY_MIB"]) == L4_MIB * 20 // 100
            assert len(view.gpus) == 1
            assert pod["spec"]["containers"][0]["resources"] == {"claims": [{"name": "gpudra-main"}]}
        assert sum(int(cluster.view(pod).env["GPUDRA_SHARE_MEMORY_MIB"]) for pod in pods) <= L4_MIB
        # The MPS daemons hold each to exactly that.
        limits = [row.spec for row in cluster.sim.nodes["n"].keeper.daemons()]
        assert [spec.active_thread_percentage for spec in limits] == [20] * 5
        assert [list(spec.pinned_memory_mib.values()) for spec in limits] == [[L4_MIB * 20 // 100]] * 5
        # The sixth finds the other card; one that is too large for what is left waits.
        cluster.namespace("team-5")
        cluster.pod("team-5")
        cluster.running(6)
        sixth = allocated(cluster)["team-5"]["device"]
        assert sixth != card
        cluster.pod("team-5", "large", {"nvidia.com/gpu": "0.9"})
        assert "cannot allocate" in cluster.waiting("large")
        assert cluster.consumed() == {card: {"shares": 100}, sixth: {"shares": 20}}
        # Whole cards: the two that are not shared, and no more though a shared one has room.
        for number in range(3):
            cluster.pod("team-5", f"whole-{number}", {"nvidia.com/gpu": "1"})
        cluster.running(8)
        late = [
            each
            for each in cluster.sim.pods()
            if each["metadata"]["name"].startswith("whole") and each["status"].get("phase") != "Running"
        ]
        assert len(late) == 1
        assert cluster.waiting(late[0]["metadata"]["name"])
        whole = {
            result["device"]
            for claim in cluster.sim.claims()
            for result in claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())
            if "shareID" not in result
        }
        assert len(whole) == 2
        assert not whole & {card, sixth}


def test_a_deployment_with_a_fraction_gets_its_pods_and_leaves_no_template_behind(root, webhook):
    with Cluster(root, webhook, sharing="100", nodes=[("n", "t4-x1")]) as cluster:
        cluster.sim.apply(ROOT / "examples" / "fractional.yaml")
        pods = cluster.running(2)
        assert {each["metadata"]["namespace"] for each in pods} == {"fractional"}
        templates = "/apis/resource.k8s.io/v1/resourceclaimtemplates"
        assert [
            each["metadata"]["name"].startswith("gpu-share-20of100-") for each in cluster.sim.items(templates)
        ] == [True]
        cluster.sim.until(lambda: len(cluster.sim.claims()) == 2, "two claims")
        # Without the label the API server refuses the fraction itself.
        document = list(read_manifests([ROOT / "examples" / "fractional.yaml"]))[1]
        document["metadata"]["namespace"] = "default"
        status, answer = cluster.create("/apis/apps/v1/namespaces/default/deployments", document)
        assert status == 422
        assert "must be an integer" in answer["message"]
        # The object's own label does as well as the namespace's; a dry run leaves nothing.
        document["metadata"] |= {"labels": {"gpudra.dev/fractions": "enabled"}, "name": "other"}
        status, answer = cluster.create("/apis/apps/v1/namespaces/default/deployments?dryRun=All", document)
        assert status == 201
        assert answer["spec"]["template"]["spec"]["resourceClaims"]
        assert {each["metadata"]["namespace"] for each in cluster.sim.items(templates)} == {"fractional"}
        cluster.sim.delete(ROOT / "examples" / "fractional.yaml")
        cluster.sim.until(
            lambda: not cluster.sim.items(templates), "the template to be collected", timeout_seconds=60
        )
        node = cluster.sim.nodes["n"]
        cluster.sim.until(
            lambda: not list(node.cdi_root.glob("*.yaml")), "the CDI files to go", timeout_seconds=60
        )


def test_on_a_card_that_is_shared_by_memory_a_whole_card_is_all_of_its_memory(root, webhook):
    with Cluster(root, webhook, sharing="memory", nodes=[("n", "t4-x1")]) as cluster:
        cluster.namespace("team")
        cluster.pod("team", "small", {"nvidia.com/gpumem": "3000"})
        (small,) = cluster.running(1)
        assert cluster.view(small).env["GPUDRA_SHARE_MEMORY_MIB"] == "3000"
        cluster.pod("team", "whole", {"nvidia.com/gpu": "1"})
        assert cluster.waiting("whole")
        cluster.sim.api.request("DELETE", "/api/v1/namespaces/team/pods/small")
        cluster.sim.until(
            lambda: [pod for pod in cluster.running(1) if pod["metadata"]["name"] == "whole"],
            "the whole card",
            timeout_seconds=60,
        )
        cluster.pod("team", "late", {"nvidia.com/gpumem": "3000"})
        assert cluster.waiting("late")


def test_the_shares_example_runs_and_a_wrong_configuration_is_refused_when_it_is_written(root, webhook):
    with Cluster(root, webhook, sharing="4", nodes=[("n", "t4-x1")]) as cluster:
        cluster.sim.apply(ROOT / "examples" / "shares.yaml")
        views = {pod["metadata"]["name"]: cluster.view(pod) for pod in cluster.running(2)}
        (item,) = cluster.sim.slices()
        total = Quantity.parse(item["spec"]["devices"][0]["capacity"]["memory"]["value"]).value >> 20
        assert int(views["small"].env["GPUDRA_SHARE_MEMORY_MIB"]) == total // 4
        assert views["large"].env["GPUDRA_SHARE_MEMORY_MIB"] == "6144"
        assert (views["small"].env["GPUDRA_SHARE_PERCENT"], views["large"].env["GPUDRA_SHARE_PERCENT"]) == (
            "25",
            "50",
        )
        parameters = {
            "apiVersion": "resource.nvidia.com/v1beta1",
            "kind": "GpuConfig",
            "sharing": {"strategy": "Both"},
        }
        claim = {
            "apiVersion": "resource.k8s.io/v1beta1", "kind": "ResourceClaim", "metadata": {"name": "wrong"},
            "spec": {"devices": {
                "requests": [{"name": "gpu", "deviceClassName": "gpu.nvidia.com"}],
                "config": [{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}],
            }},
        }  # fmt: skip
        status, answer = cluster.create(
            "/apis/resource.k8s.io/v1beta1/namespaces/default/resourceclaims", claim
        )
        assert status == 403, answer
        assert "sharing.strategy" in answer["message"]
        # Nobody is asked about what is not ours.
        cluster._webhook.stop()
        del claim["spec"]["devices"]["config"]
        status, answer = cluster.create(
            "/apis/resource.k8s.io/v1beta1/namespaces/default/resourceclaims", claim
        )
        assert status == 201, answer


def mps_log(node):
    """Give what the stand-ins of nvidia-cuda-mps-control wrote down."""
    file = node.root / "sim/mps.log"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def enforcement(cluster):
    return {
        each["attributes"]["gpudra.dev/enforcement"]["string"]
        for item in cluster.sim.slices()
        for each in item["spec"]["devices"]
    }


def test_each_fraction_has_an_mps_daemon_with_exactly_its_limits_and_the_last_end_leaves_none(root, webhook):
    with Cluster(root, webhook, sharing="100", nodes=[("n", "t4-x1")]) as cluster:
        node = cluster.sim.nodes["n"]
        cluster.sim.until(
            lambda: enforcement(cluster) == {"per-process"}, "the keeper to be seen", timeout_seconds=90
        )
        cluster.namespace("team")
        for name, part in (("small", "0.2"), ("large", "0.5")):
            cluster.pod("team", name, {"nvidia.com/gpu": part})
        pods = {pod["metadata"]["name"]: pod for pod in cluster.running(2)}
        views = {name: cluster.view(pod) for name, pod in pods.items()}
        (item,) = cluster.sim.slices()
        (device,) = item["spec"]["devices"]
        total = Quantity.parse(device["capacity"]["memory"]["value"]).value >> 20
        wanted = {"small": (20, total * 20 // 100), "large": (50, total * 50 // 100)}
        for name, (percent, mib) in wanted.items():
            assert views[name].env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == str(percent)
            assert views[name].env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == f"0={mib}M"
            assert views[name].env["GPUDRA_SHARE_ENFORCEMENT"] == "per-process"
            assert {"/dev/shm", "/tmp/nvidia-mps"} <= set(views[name].mounts)
        commands = {entry["command"] for entry in mps_log(node) if entry["what"] == "command"}
        uuid = device["attributes"]["uuid"]["string"]
        assert {each for each in commands if each.startswith("set_default")} == {
            command
            for percent, mib in wanted.values()
            for command in (
                f"set_default_active_thread_percentage {percent}",
                f"set_default_device_pinned_mem_limit {uuid} {mib}M",
            )
        }
        shared = [
            {view.mounts["/dev/shm"].source for view in views.values()},
            {view.mounts["/tmp/nvidia-mps"].source for view in views.values()},
        ]
        assert [len(each) for each in shared] == [2, 2]

        def told():
            events = cluster.sim.items("/api/v1/namespaces/team/events")
            return [each for each in events if each["reason"] == "ShareEnforced"] or None

        assert cluster.sim.until(told, "the claim's Event", timeout_seconds=60)[0]["type"] == "Normal"
        for name in pods:
            cluster.sim.api.request("DELETE", f"/api/v1/namespaces/team/pods/{name}")
        folder = node.state_dir / "mps"
        cluster.sim.until(
            lambda: not [each for each in folder.iterdir() if each.is_dir()],
            "the daemons to end",
            timeout_seconds=60,
        )


def test_a_server_that_keeps_no_shares_gives_exclusive_cards_and_the_node_says_so(root, webhook):
    with Cluster(
        root, webhook, sharing="4", nodes=[("n", "t4-x1")], features={"DRAConsumableCapacity": False}
    ) as cluster:
        (item,) = cluster.sim.slices()
        assert "allowMultipleAllocations" not in json.dumps(item)
        cluster.sim.apply(ROOT / "examples" / "gpu-per-pod.yaml")
        cluster.running(1)

        def told():
            events = cluster.sim.items("/api/v1/namespaces/default/events")
            return [each for each in events if each["reason"] == "GpuSharingNotPublished"]

        (event,) = cluster.sim.until(told, "the Node's event", timeout_seconds=60)
        assert event["involvedObject"]["kind"] == "Node"
        assert "DRAConsumableCapacity" in event["message"]
