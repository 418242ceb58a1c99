"""Device metadata: files in which a container reads what its claim's devices are, without asking anybody.

One file for each request of a claim, mounted into the containers that use the request by a CDI device of its own,
whose id goes to the kubelet with the request's first device. By option only.

Source: KEP-5304 (metadata.resource.k8s.io/v1alpha1 DeviceMetadata), the paths and names of the Kubernetes DRA helper library.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from dra.api.claim import AllocatedDevice, ClaimView
from dra.cdi.checked import as_checked
from dra.cdi.spec import FLOOR
from dra.host.files import ensure_dir, host_error, read_bytes, write_durable
from dra.prepare.effects import Effect
from dra.prepare.model import PreparedDevice
from dra.prepare.plan import Plan
from dra.prepare.record import Record

API_VERSION, KIND = "metadata.resource.k8s.io/v1alpha1", "DeviceMetadata"
CONTAINER_ROOT = "/var/run/kubernetes.io/dra-device-attributes"
EFFECT = "device-metadata"
# Others than root read it in their containers.
FILE_MODE, DIRECTORY_MODE = 0o644, 0o755

Attributes = Callable[[str], Mapping[str, Any]]


class MetadataFiles:
    """Where the files of one driver are.

    Args:
        driver: the driver's name.
        state_dir: the driver's directory among the kubelet's plugins.
        cdi_root: where CDI specs are.
        host_path: gives the host's spelling of a path.
    """

    def __init__(
        self, driver: str, *, state_dir: Path, cdi_root: Path, host_path: Callable[[Path], str] = str
    ) -> None:
        self.driver, self.host_path = driver, host_path
        self.root, self.file_name = state_dir / "dra-device-metadata", "metadata.json"
        self.cdi_root, self.spec_prefix = cdi_root, f"{driver}_metadata_"

    def folder(self, namespace: str, name: str, request: str) -> Path:
        """Give the directory of a claim's request."""
        return self.root / f"{namespace}_{name}" / request

    def spec(self, uid: str, request: str) -> Path:
        """Give the CDI spec of a claim's request."""
        return self.cdi_root / f"{self.spec_prefix}{uid}_{request}.json"

    def device(self, uid: str, request: str) -> str:
        """Give the CDI id of a claim's request."""
        return f"{self.driver}/metadata={uid}_{request}"

    def in_container(self, name: str, pod_claim: str, request: str) -> str:
        """Give where a container finds the file: by the name of the claim, or of the pod's entry for a template."""
        kind, owner = ("resourceclaimtemplates", pod_claim) if pod_claim else ("resourceclaims", name)
        return f"{CONTAINER_ROOT}/{kind}/{owner}/{request}/{self.driver}-metadata.json"


class WriteMetadata:
    """The file and the CDI spec of one request.

    `content` is called when the file is first needed, after the effects before it: it may name a partition that one
    of them makes.
    """

    kind: ClassVar[str] = EFFECT
    ends_with_boot: ClassVar[bool] = False
    shared_resource: str | None = None

    def __init__(
        self,
        files: MetadataFiles,
        args: Mapping[str, Any],
        *,
        content: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        names = {key: str(args[key]) for key in ("namespace", "claim", "uid", "request", "podClaim")}
        if any("/" in each or each in (".", "..") for each in names.values()):
            raise ValueError(f"{names} are no names")
        self._files, self._args, self._content = files, names, content
        self._path = files.folder(names["namespace"], names["claim"], names["request"]) / files.file_name
        self._spec = files.spec(names["uid"], names["request"])
        self._wanted: Mapping[str, Any] | None = None

    def args(self) -> Mapping[str, Any]:
        """Give whose file it is."""
        return dict(self._args)

    def apply(self) -> None:
        """Write the file, in place where there is one, and the spec."""
        wanted, before = self._metadata(), self._read()
        generation = 1
        if before is not None and before["metadata"].get("uid") == self._args["uid"]:
            generation = int(before["metadata"].get("generation") or 0) + 1
        document = {**wanted, "metadata": {**wanted["metadata"], "generation": generation}}
        _write_in_place(self._path, json.dumps(document, indent=2).encode() + b"\n")
        ensure_dir(self._spec.parent)
        write_durable(self._spec, as_checked(self._cdi()).data, mode=FILE_MODE, fsync=False)

    def verify(self) -> bool:
        """Whether file and spec say what they should."""
        found = self._read()
        if found is None:
            return False
        found["metadata"].pop("generation", None)
        return found == self._metadata() and read_bytes(self._spec) == as_checked(self._cdi()).data

    def undo(self) -> None:
        """Remove both, unless the file is that of a newer claim of the same name."""
        _remove(self._spec)
        found = self._read()
        if found is not None and found["metadata"].get("uid") != self._args["uid"]:
            return
        _remove(self._path)
        for folder in (self._path.parent, self._path.parent.parent):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _metadata(self) -> Mapping[str, Any]:
        if self._wanted is None:
            self._wanted = self._content()
        return self._wanted

    def _read(self) -> dict[str, Any] | None:
        """Read the file; None if it is not there, or no metadata of ours."""
        data = read_bytes(self._path)
        try:
            found = json.loads(data or b"null")
        except ValueError:
            return None
        return found if isinstance(found, dict) and isinstance(found.get("metadata"), dict) else None

    def _cdi(self) -> dict[str, Any]:
        uid, request = self._args["uid"], self._args["request"]
        mount = {
            "hostPath": self._files.host_path(self._path),
            "containerPath": self._files.in_container(self._args["claim"], self._args["podClaim"], request),
            "options": ["ro", "bind"],
        }
        return {
            "cdiVersion": FLOOR,
            "kind": f"{self._files.driver}/metadata",
            "devices": [{"name": f"{uid}_{request}", "containerEdits": {"mounts": [mount]}}],
        }


class MetadataPlanner:
    """Adds the metadata of a claim to its plan.

    Args:
        files: where they are.
        attributes: gives the published attributes of a device.
        enabled: whether files are written; what is there is removed with its claim in any case.
    """

    def __init__(self, files: MetadataFiles, attributes: Attributes, *, enabled: bool = True) -> None:
        self.files, self._attributes, self._enabled = files, attributes, enabled

    def effects(self) -> Mapping[str, Callable[[Mapping[str, Any]], Effect]]:
        """Give how effects of this kind are made from the journal."""
        return {EFFECT: lambda args: WriteMetadata(self.files, args)}

    def add(self, view: ClaimView, plan: Plan) -> tuple[tuple[Effect, ...], tuple[PreparedDevice, ...]]:
        """Give the further effects, and the devices with the ids of the metadata."""
        if not self._enabled:
            return (), plan.devices
        by_request: dict[str, list[AllocatedDevice]] = {}
        for result in view.results:
            by_request.setdefault(result.request_name, []).append(result)
        effects = tuple(self._effect(view, plan, request, results) for request, results in by_request.items())
        waiting = dict.fromkeys(by_request)
        devices = []
        for device in plan.devices:
            more = [name for name in device.request_names if name in waiting]
            for name in more:
                del waiting[name]
            ids = (self.files.device(view.ref.uid, name) for name in more)
            devices.append(replace(device, cdi_ids=(*device.cdi_ids, *ids)))
        return effects, tuple(devices)

    def _effect(
        self, view: ClaimView, plan: Plan, request: str, results: Sequence[AllocatedDevice]
    ) -> WriteMetadata:
        ref = view.ref
        args = {
            "namespace": ref.namespace, "claim": ref.name, "uid": ref.uid, "request": request,
            "podClaim": view.pod_claim_name,
        }  # fmt: skip
        return WriteMetadata(self.files, args, content=lambda: self._content(view, plan, results))

    def _content(self, view: ClaimView, plan: Plan, results: Sequence[AllocatedDevice]) -> Mapping[str, Any]:
        requests: dict[str, list[dict[str, Any]]] = {}
        for result in results:
            attributes = dict(self._attributes(result.device))
            made = plan.made.get(result.device)
            if made is not None:
                attributes["uuid"] = {"string": made.partition.uuid}
            requests.setdefault(result.request, []).append(
                {
                    "driver": result.driver,
                    "pool": result.pool,
                    "name": result.device,
                    "attributes": attributes,
                }
            )
        ref = view.ref
        return {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": ref.name, "namespace": ref.namespace, "uid": ref.uid},
            **({"podClaimName": view.pod_claim_name} if view.pod_claim_name else {}),
            "requests": [{"name": name, "devices": devices} for name, devices in requests.items()],
        }


def pod_claim_of(record: Record) -> str:
    """Give the name of the pod's entry that a record remembers; empty for a claim that is used by its own name."""
    return next((str(each.args.get("podClaim") or "") for each in record.journal if each.kind == EFFECT), "")


def _write_in_place(path: Path, data: bytes) -> None:
    """Write a file without another one taking its place: a bind mount follows the file, not the name.

    Raises:
        HostError: DRA-HOST-NO-SPACE, ...
    """
    ensure_dir(path.parent.parent, mode=DIRECTORY_MODE)
    ensure_dir(path.parent, mode=DIRECTORY_MODE)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        try:
            os.fchmod(descriptor, FILE_MODE)
            view = memoryview(data)
            offset = 0
            while offset < len(data):
                offset += os.pwrite(descriptor, view[offset:], offset)
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise host_error(error, "write", path) from error


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except NotADirectoryError:
        return
    except OSError as error:
        raise host_error(error, "remove", path) from error
