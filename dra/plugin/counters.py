"""Whether the API server keeps counters, and shares of devices: asked with a trial object that is never stored.

The version does not tell: the feature gate may be on where it is off by default, and off where it is on. A pool whose
counters were dropped would offer a GPU and its partitions side by side until that is noticed, and one whose shares were
dropped would be given out whole to each who wants a share; so it is asked first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dra.errors import KubeError
from dra.slices.features import COUNTERS_SINCE, SHARES_SINCE, ServerFeatures
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
    answer = _try(client, trial_slice(version, driver=driver, node_name=node_name), what="counters")
    if not isinstance(answer, dict):
        return answer
    kept = bool((answer.get("spec") or {}).get("sharedCounters"))
    log.info("counters_support_known", kept=kept)
    return kept


def server_keeps_shares(
    client: KubeClient, version: tuple[int, int], *, driver: str, node_name: str
) -> bool | None:
    """Ask whether devices that several claims share are stored as such; None if the server did not say."""
    if version < SHARES_SINCE:
        return False
    trial = _slice({"devices": [{"name": "trial", "allowMultipleAllocations": True}]}, driver, node_name)
    answer = _try(client, trial, what="shares")
    if not isinstance(answer, dict):
        return answer
    devices = (answer.get("spec") or {}).get("devices") or [{}]
    kept = bool(devices[0].get("allowMultipleAllocations"))
    log.info("shares_support_known", kept=kept)
    return kept


def _try(client: KubeClient, trial: dict[str, Any], *, what: str) -> dict[str, Any] | bool | None:
    """Give what the server would store; False: what is left of it is no slice; None: it did not say."""
    from dra.kube.resources import RESOURCE_SLICES

    try:
        return client.create(RESOURCE_SLICES, trial, dry_run=True, timeout_seconds=ASK_SECONDS)
    except KubeError as error:
        if error.code == "DRA-API-INVALID":
            return False
        log.warning("support_unknown", what=what, **error_fields(error))
        return None


def trial_slice(version: tuple[int, int], *, driver: str, node_name: str) -> dict[str, Any]:
    """Give a slice with one counter, in the layout of a server of this version."""
    spec: dict[str, Any] = {
        "sharedCounters": [{"name": "trial", "counters": {"trial": {"value": "1"}}}],
    }
    if not ServerFeatures.of_version(*version).counters_apart:
        spec["devices"] = [
            {
                "name": "trial",
                "consumesCounters": [{"counterSet": "trial", "counters": {"trial": {"value": "1"}}}],
            }
        ]
    return _slice(spec, driver, node_name)


def _slice(spec: dict[str, Any], driver: str, node_name: str) -> dict[str, Any]:
    common = {
        "driver": driver,
        "nodeName": node_name,
        "pool": {"name": node_name, "generation": 1, "resourceSliceCount": 1},
    }
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"generateName": "dra-trial-"},
        "spec": {**common, **spec},
    }
