"""What the daemon does for its node beside claims: links for systemd, node labels where somebody wants them, and the
Deployments that NVIDIA's driver left, each by option; and a word about a device plugin beside it. None of it is needed to
prepare a claim, and none can stop one.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dra.errors import DraError, HostError, KubeError
from dra.inventory.model import Inventory
from dra.telemetry.log import error_fields, get_logger
from dra.telemetry.threads import start_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from dra.host.paths import HostPaths
    from dra.inventory.diff import InventoryDiff
    from dra.inventory.live import LiveInventory
    from dra.kube.client import KubeClient
    from dra.kube.events import EventRecorder
    from dra.plugin.settings import PluginSettings

log = get_logger()

FEATURE_FILE = "dra-gpu"
FEATURES_DIR = "etc/kubernetes/node-feature-discovery/features.d"


def keep_up(
    inventory: LiveInventory,
    settings: PluginSettings,
    paths: HostPaths,
    client: KubeClient,
    *,
    events: EventRecorder | None = None,
) -> None:
    """Have what was asked for done at each change of the hardware."""
    inventory.subscribe(DevicePluginWatch(paths, settings.node_name, events).inventory_changed)
    if settings.dev_char_links:
        inventory.subscribe(lambda _inventory, _difference: link_devices(paths))
    if settings.node_labels == "nfd":
        inventory.subscribe(lambda found, _difference: write_feature_file(paths, found))
    elif settings.node_labels == "api":
        labeller = NodeLabeller(client, settings.node_name)
        inventory.subscribe(lambda found, _difference: labeller.want(found))


class DevicePluginWatch:
    """Says once, in the log and on the Node, that a device plugin offers the same GPUs: nothing keeps the two apart."""

    def __init__(self, paths: HostPaths, node_name: str, events: EventRecorder | None = None) -> None:
        # Beside the plugins' directory, which alone is mounted at its own place; else below the host's root.
        places = (paths.kubelet_plugins_dir.parent, paths.host_root / "var/lib/kubelet")
        self._folders = tuple(dict.fromkeys(place / "device-plugins" for place in places))
        self._node_name, self._events = node_name, events
        self._told = False

    def inventory_changed(self, inventory: Inventory, _difference: InventoryDiff) -> None:
        """Look again (a subscriber of the live inventory)."""
        self.look(inventory)

    def look(self, inventory: Inventory) -> bool:
        """Look, and tell if it is new; whether one is active. Never raises."""
        active = bool(inventory.gpus) and any(_answers(path) for path in self._sockets())
        if active and not self._told:
            text = (
                "DRA-DEVICE-PLUGIN-ACTIVE: a device plugin offers the GPUs of this node too: both may give out the same one. "
                "Keep it off nodes with this driver (docs/migration.md)."
            )
            log.warning("device_plugin_active", node=self._node_name, text=text)
            if self._events is not None:
                from dra.kube.events import ObjectReference

                about = ObjectReference("v1", "Node", self._node_name, self._node_name)
                self._events.emit(about, "Warning", "DevicePluginActive", text)
        self._told = active
        return active

    def _sockets(self) -> list[Path]:
        found: list[Path] = []
        for folder in self._folders:
            try:
                found += sorted(
                    path
                    for path in folder.iterdir()
                    if path.name.startswith("nvidia") and path.suffix == ".sock"
                )
            except OSError:
                continue
        return found


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def link_devices(paths: HostPaths) -> None:
    """Make the links below /dev/char. Never raises."""
    from dra.cdi.char_links import make_char_links

    try:
        made = make_char_links(paths)
    except OSError as error:
        log.warning("dev_char_links_not_made", error=str(error))
        return
    if made:
        log.info("dev_char_links_made", links=list(made))


def write_feature_file(paths: HostPaths, inventory: Inventory) -> None:
    """Write the labels where node feature discovery reads them; needs no right in the API. Never raises."""
    from dra.host.files import ensure_dir, write_durable
    from dra.inventory.gfd import labels_of

    path = paths.host_root / FEATURES_DIR / FEATURE_FILE
    lines = [f"{name}={value}\n" for name, value in sorted(labels_of(inventory).items())]
    try:
        ensure_dir(path.parent)
        write_durable(path, "".join(lines).encode(), mode=0o644, fsync=False)
    except HostError as error:
        log.warning("feature_file_not_written", **error_fields(error))


class NodeLabeller:
    """Sets the labels on the Node itself, in a thread of its own, and tries again where the API does not answer."""

    def __init__(self, client: KubeClient, node_name: str, *, retry_seconds: float = 30.0) -> None:
        self._client, self._node_name, self._retry_seconds = client, node_name, retry_seconds
        self._wanted: dict[str, str | None] | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()

    def want(self, inventory: Inventory) -> None:
        """Have the node labelled as this inventory says; returns at once."""
        from dra.inventory.gfd import ATTRIBUTE_OF, labels_of

        labels = labels_of(inventory)
        with self._lock:
            # What is not true any more goes.
            self._wanted = {**dict.fromkeys(ATTRIBUTE_OF), **labels}
            self._changed.set()
            if self._thread is not None and self._thread.is_alive():
                return
            self._thread = threading.Thread(target=self._run, name="node-labels", daemon=True)
        try:
            start_thread(self._thread)
        except HostError as error:
            log.warning("node_not_labelled", **error_fields(error))

    def _run(self) -> None:
        while True:
            with self._lock:
                wanted = self._wanted
                self._changed.clear()
            try:
                self._put(wanted)
            except KubeError as error:
                log.warning("node_not_labelled", node=self._node_name, **error_fields(error))
                self._changed.wait(self._retry_seconds)
                continue
            with self._lock:
                if not self._changed.is_set():
                    self._thread = None
                    return

    def _put(self, labels: Any) -> None:
        from dra.kube.resources import NODES

        self._client.patch(NODES, self._node_name, {"metadata": {"labels": labels}})
        log.info("node_labelled", node=self._node_name, labels={k: v for k, v in (labels or {}).items() if v})


def deployment_deleter(client: KubeClient, settings: PluginSettings) -> Callable[[str], None] | None:
    """Give what deletes a Deployment of NVIDIA's driver by its name; None unless that was asked for."""
    if not settings.clean_up_mps_deployments:
        return None

    def delete(name: str) -> None:
        from dra.kube.resources import Resource

        deployments = Resource("apps", ("v1",), "deployments", "Deployment", namespaced=True)
        try:
            client.delete(deployments, name, settings.namespace, timeout_seconds=5.0)
        except DraError as error:
            if error.code != "DRA-API-NOT-FOUND":
                raise

    return delete
