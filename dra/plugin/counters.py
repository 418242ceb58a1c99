"""Whether the API server keeps counters: asked with a trial object that is never stored.

The version does not tell: the feature gate may be on where it is off by default, and off where it is on. A pool whose
counters were dropped would offer a GPU and its partitions side by side until that is noticed; so it is asked first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dra.errors import KubeError
from dra.slices.features import COUNTERS_SINCE, ServerFeatures
from dra.telemetry.log import error_fields, get_logger

if TYPE_CHECKING:
    from dra.kube.client import KubeClient

log = get_logger()

ASK_SECONDS = 5.0


def server_keeps_counters(
    client: KubeClient, version: tuple[int, int], *, driver: str, node_name: str
) -> bool | None:
    """Ask whether counter sets are stored; None if the server did not say.

    Source: dryRun=All of the Kubernetes API: admission and dropping of fields happen, storing does not.
    """
    if version < COUNTERS_SINCE:
        return False
    from dra.kube.resources import RESOURCE_SLICES

    trial = trial_slice(version, driver=driver, node_name=node_name)
    try:
        answer = client.create(RESOURCE_SLICES, trial, dry_run=True, timeout_seconds=ASK_SECONDS)
    except KubeError as error:
        if error.code == "DRA-API-INVALID":  # what is left of it without counters is no slice
            return False
        log.warning("counters_support_unknown", **error_fields(error))
        return None
    kept = bool((answer.get("spec") or {}).get("sharedCounters"))
    log.info("counters_support_known", kept=kept)
    return kept


def trial_slice(version: tuple[int, int], *, driver: str, node_name: str) -> dict[str, Any]:
    """Give a slice with one counter, in the layout of a server of this version."""
    spec: dict[str, Any] = {
        "driver": driver,
        "nodeName": node_name,
        "pool": {"name": node_name, "generation": 1, "resourceSliceCount": 1},
        "sharedCounters": [{"name": "trial", "counters": {"trial": {"value": "1"}}}],
    }
    if not ServerFeatures.of_version(*version).counters_apart:
        spec["devices"] = [
            {
                "name": "trial",
                "consumesCounters": [{"counterSet": "trial", "counters": {"trial": {"value": "1"}}}],
            }
        ]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"generateName": "dra-trial-"},
        "spec": spec,
    }
