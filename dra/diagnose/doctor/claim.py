"""The ladder of a claim: from the API to the files that its containers get."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from dra.api.claim import ClaimView, parse_claim
from dra.cdi.files import SpecFiles
from dra.cdi.nodes import read_node
from dra.diagnose.doctor.cdi_rung import SpecOnDisk, missing_paths, specs_on_disk
from dra.diagnose.doctor.context import DRIVER, NodeContext
from dra.diagnose.doctor.model import Finding, Looked, Report, Step, climb, error, note, warning
from dra.diagnose.doctor.published_rungs import RecordOnDisk, look_at_slices, records_on_disk
from dra.diagnose.explain.cluster import CLAIM, POD, Cluster
from dra.diagnose.explain.prepare import why_not_running
from dra.errors import ClaimError
from dra.host.boot import boot_id
from dra.host.driver_files import find_driver_files
from dra.host.paths import strip_root
from dra.host.proc import device_majors, kernel_driver_version
from dra.values.words import counted


class ClaimLadder:
    """Climbs for one claim. `ctx` is the node that this process sees, None if it sees none."""

    def __init__(
        self,
        name: str,
        namespace: str,
        *,
        cluster: Cluster | None,
        ctx: NodeContext | None,
        driver: str = DRIVER,
    ) -> None:
        self.name, self.namespace, self.driver = name, namespace, driver
        self.cluster, self.ctx = cluster, ctx
        self._claim = cluster.find(CLAIM, name, namespace) if cluster is not None else None
        self._record: RecordOnDisk | None = None
        if ctx is not None:
            self._record = next((each for each in records_on_disk(ctx) if self._is_ours(each)), None)

    def _is_ours(self, each: RecordOnDisk) -> bool:
        if self._claim is not None:
            return bool(each.uid == self._claim["metadata"].get("uid"))
        return each.record is not None and (each.record.ref.namespace, each.record.ref.name) == (
            self.namespace,
            self.name,
        )

    def climb(self) -> Report:
        """Give the report."""
        steps: list[Step] = []
        if self.cluster is not None:
            steps += [
                ("claim", self._look_at_claim),
                ("allocation", self._look_at_allocation),
                ("reservation", self._look_at_reservation),
                ("placement", self._look_at_placement),
            ]
        if self._on_this_node():
            steps += [
                ("record", self._look_at_record),
                ("cdi-file", self._look_at_cdi_file),
                ("device-files", self._look_at_device_files),
                ("driver-files", self._look_at_driver_files),
            ]
        return climb(f"claim/{self.namespace}/{self.name}", steps)

    def _on_this_node(self) -> bool:
        if self.ctx is None:
            return False
        return (
            self._claim is None
            or self._record is not None
            or any(r.pool == self.ctx.node_name for r in self._view().results)
        )

    def _view(self) -> ClaimView:
        assert self._claim is not None
        return parse_claim(self._claim, driver=self.driver)

    # -- the API ---------------------------------------------------------------------------------------------

    def _look_at_claim(self) -> Looked:
        assert self.cluster is not None
        if self._claim is not None:
            return Looked(f"UID {self._claim['metadata'].get('uid')}")
        if not self.cluster.knows(CLAIM):
            return Looked("", unknown=f"ResourceClaims {self.cluster.unread[CLAIM]}")
        raise ClaimError(
            "DRA-CLAIM-NOT-FOUND", f"there is no claim {self.namespace}/{self.name}",
            remedy="kubectl get resourceclaims -A shows their names; -n NAMESPACE chooses the namespace.",
        )  # fmt: skip

    def _look_at_allocation(self) -> Looked:
        if self._claim is None:
            return Looked("", unknown="the claim may not be read")
        view = self._view()
        if not view.allocated:
            finding = error(
                "DRA-CLAIM-NOT-ALLOCATED",
                f"claim {view.ref} has no device yet",
                f"dra explain claim/{self.name} -n {self.namespace} says why.",
            )
            return Looked("", (finding,))
        if not view.results:
            return Looked(
                "", (note("DRA-CLAIM-NOT-OURS", f"claim {view.ref} has no device of {self.driver}"),)
            )
        return Looked(", ".join(f"{r.request}: {r.device} of {r.pool}" for r in view.results))

    def _look_at_reservation(self) -> Looked:
        if self._claim is None:
            return Looked("", unknown="the claim may not be read")
        users = self._view().reserved_for
        if not users:
            text = "no pod uses it: it is prepared when one starts"
            return Looked(
                text,
                (
                    note(
                        "DRA-CLAIM-NOT-RESERVED",
                        f"claim {self.namespace}/{self.name} is allocated and reserved for nobody",
                    ),
                ),
            )
        return Looked(", ".join(map(str, users)))

    def _look_at_placement(self) -> Looked:
        assert self.cluster is not None
        if self._claim is None:
            return Looked("", unknown="the claim may not be read")
        view = self._view()
        pools = list(dict.fromkeys(result.pool for result in view.results))
        findings: list[Finding] = []
        for pool in pools:
            findings += look_at_slices(self.cluster, pool, self.driver).findings
        # A device taken away after it was allocated is still prepared: no reason to stop here.
        findings = [
            Finding("warning", f.code, f.message, f.remedy) if f.severity == "error" else f for f in findings
        ]
        findings += self._prepare_failures(view)
        text = f"node {', '.join(pools)}" if pools else "-"
        if not self._on_this_node() and pools:
            findings.append(note("DRA-DOCTOR-ELSEWHERE", f"its files are on node {pools[0]}, which is not seen from here",
                                 f"kubectl exec there: dra doctor claim/{self.name} -n {self.namespace}"))  # fmt: skip
        return Looked(text, tuple(findings))

    def _prepare_failures(self, view: ClaimView) -> Iterator[Finding]:
        assert self.cluster is not None
        assert self._claim is not None
        for user in view.reserved_for:
            pod = self.cluster.find(POD, user.name, self.namespace)
            if (
                pod is None
                or not (pod.get("spec") or {}).get("nodeName")
                or (pod.get("status") or {}).get("phase") == "Running"
            ):
                continue
            for reason in why_not_running(pod, [self._claim], self.cluster):
                if reason.code in ("prepare-failed", "driver-not-registered", "claim-warning", "driver-down"):
                    yield warning("DRA-PREPARE-FAILED", reason.message, reason.remedy)

    # -- the node --------------------------------------------------------------------------------------------

    def _look_at_record(self) -> Looked:
        assert self.ctx is not None
        if self._record is None:
            finding = error(
                "DRA-CLAIM-NOT-PREPARED", f"node {self.ctx.node_name} has no record of claim {self.namespace}/{self.name}: it was not prepared",
                "The pod's events have the kubelet's reason; dra doctor on this node finds what is broken below.",
            )  # fmt: skip
            return Looked("", (finding,))
        record = self._record.record
        if record is None:
            return Looked(
                "",
                (
                    error(
                        self._record.code,
                        self._record.trouble,
                        "It is rebuilt when the claim is prepared again: restart the pod.",
                    ),
                ),
            )
        if not record.is_complete(boot_id(self.ctx.paths)):
            state = record.state if record.state != "prepared" else "of an earlier boot"
            return Looked(
                "",
                (
                    error(
                        "DRA-CLAIM-HALF",
                        f"the record of claim {record.ref} is {state}",
                        "The kubelet calls again within two minutes.",
                    ),
                ),
            )
        return Looked(f"prepared: {', '.join(device.device for device in record.devices)}")

    def _spec(self) -> SpecOnDisk:
        assert self.ctx is not None
        assert self._record is not None
        path = SpecFiles(self.ctx.paths.cdi_root, driver=self.driver).path(self._record.uid)
        return SpecOnDisk(str(path), path.read_bytes())

    def _look_at_cdi_file(self) -> Looked:
        assert self.ctx is not None
        assert self._record is not None
        assert self._record.record is not None
        record = self._record.record
        path = SpecFiles(self.ctx.paths.cdi_root, driver=self.driver).path(self._record.uid)
        rewrite = "The plugin writes it again within a minute, or at the next prepare (restart the pod)."
        if not path.is_file():
            return Looked(
                "",
                (
                    error(
                        "DRA-CDI-FILE-MISSING",
                        f"the CDI file {path} of claim {record.ref} is not there",
                        rewrite,
                    ),
                ),
            )
        spec = self._spec()
        if spec.content is None:
            return Looked(
                "", (error("DRA-CDI-SPEC-UNREADABLE", f"{path} is no CDI spec: {spec.trouble}", rewrite),)
            )
        findings: list[Finding] = []
        missing = [i for device in record.devices for i in device.cdi_ids if i not in spec.names()]
        if missing:
            findings.append(
                error("DRA-CDI-UNRESOLVABLE", f"{path} does not define {', '.join(missing)}", rewrite)
            )
        elsewhere = [
            s.shown
            for s in specs_on_disk(self.ctx)
            if set(s.names()) & set(spec.names()) and not s.shown.endswith(f"/{path.name}")
        ]
        if elsewhere:
            findings.append(
                error(
                    "DRA-CDI-DEVICE-TWICE",
                    f"{', '.join(elsewhere)} defines the same devices: engines resolve neither",
                    "Remove that file.",
                )
            )
        if record.cdi_sha256 and hashlib.sha256(path.read_bytes()).hexdigest() != record.cdi_sha256:
            findings.append(warning("DRA-CDI-FILE-CHANGED", f"{path} is not as the driver wrote it", rewrite))
        return Looked(f"{path.name}, {counted(len(spec.names()), 'device')}", tuple(findings))

    def _look_at_device_files(self) -> Looked:
        assert self.ctx is not None
        view, spelling = self.ctx.paths.dev_root()
        majors = device_majors(self.ctx.paths)
        nodes = {
            str(node.get("path")): node
            for edit in self._spec().edits()
            for node in edit.get("deviceNodes") or []
        }
        findings: list[Finding] = []
        for path, node in sorted(nodes.items()):
            at = str(node.get("hostPath") or path)
            seen = read_node(view, strip_root(at, spelling) or at, stand_ins=self.ctx.paths.stand_in_nodes)
            findings += _node_findings(path, node, None if seen is None else (seen.major, seen.minor), majors)
        return Looked(f"{counted(len(nodes), 'device node')}", tuple(findings))

    def _look_at_driver_files(self) -> Looked:
        assert self.ctx is not None
        spec = self._spec()
        gone = missing_paths(self.ctx, spec)
        findings = [
            error("DRA-DRIVER-FILE-GONE", f"{path} is mounted into the claim's containers and is not on the host any more",
                  "The driver was replaced or removed: restart the pod, so that its claim is prepared with what is there now.")
            for path in gone
        ]  # fmt: skip
        loaded = kernel_driver_version(self.ctx.paths)
        files = find_driver_files(self.ctx.paths, loaded)
        findings += [
            warning(
                "DRA-DRIVER-LIBRARIES-MISSING",
                f"{name} is not there: containers miss it",
                "Install the whole driver.",
            )
            for name in files.missing
        ]
        mounts = sum(len(edit.get("mounts") or []) for edit in spec.edits())
        return Looked(f"{mounts} files of driver {files.version or '?'}", tuple(findings))


def _node_findings(
    path: str, node: Mapping[str, Any], seen: tuple[int, int] | None, majors: Mapping[str, int]
) -> Iterator[Finding]:
    if seen is None:
        if "nvidia-cap" not in path:
            yield error(
                "DRA-DEVICE-NODE-MISSING",
                f"the device node {path} is not on the host",
                "nvidia-modprobe -u -c 0 makes it; then restart the pod.",
            )
        return
    wanted = (node.get("major"), node.get("minor"))
    if None in wanted or seen == wanted or not seen[0]:
        return
    living = set(majors.values())
    why = "its module was loaded again" if seen[0] in living else "it is not the loaded module's"
    yield error(
        "DRA-DEVICE-NODE-STALE",
        f"{path} is device {seen[0]}:{seen[1]} on the host, the claim's CDI file has {wanted[0]}:{wanted[1]} ({why})",
        "Restart the pod: preparing writes the numbers of this moment.",
    )


def diagnose_claim(
    name: str, namespace: str, *, cluster: Cluster | None, ctx: NodeContext | None, driver: str = DRIVER
) -> Report:
    """Climb the ladder of a claim.

    Raises:
        ClaimError: DRA-CLAIM-NOT-FOUND: neither the API was asked nor has this node a record of it.
    """
    ladder = ClaimLadder(name, namespace, cluster=cluster, ctx=ctx, driver=driver)
    report = ladder.climb()
    if not report.rungs:
        raise ClaimError(
            "DRA-CLAIM-NOT-FOUND", f"nothing is known of claim {namespace}/{name} here",
            remedy="Give a kubeconfig, or run it on the claim's node.",
        )  # fmt: skip
    return report
