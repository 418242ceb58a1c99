"""Specs of GpuNodePolicies, and what is wrong with them: read alike by the models, the simulated and a real API server.

Each refused one has a word that must stand in the API server's answer: the field, or what the rule says.
"""

from __future__ import annotations

from typing import Any

Spec = dict[str, Any]

_UUID = "GPU-8f9f7c6a-0000-1111-2222-0123456789ab"
_SLICE = {"timeSlice": "Short"}


def _group(**blocks: Any) -> Spec:
    return {"gpus": [blocks]}


def _expression(key: str, operator: str, *values: str) -> Spec:
    expression: Spec = {"key": key, "operator": operator, **({"values": list(values)} if values else {})}
    return {"gpus": [_SLICE], "nodeSelector": {"matchExpressions": [expression]}}


ACCEPTED: dict[str, Spec] = {
    "time-slice": _group(timeSlice="Long"),
    "exclusive": _group(sharing={"strategy": "exclusive"}),
    "memory": _group(sharing={"strategy": "memory", "enforcement": "cooperative"}),
    "shares": _group(sharing={"strategy": "shares", "shares": 1000}),
    "unlimited": _group(sharing={"strategy": "unlimited"}),
    "mig-dynamic": _group(mig={"mode": "dynamic"}),
    "mig-found": _group(mig={"mode": "static"}),
    "mig-layout": _group(mig={"mode": "static", "layout": {"3g.40gb": 1, "1g.10gb+me": 1, "1c.2g.20gb": 2}}),
    "reserved": _group(reserved={}),
    "reserved-for": _group(reserved={"value": "batch.queue_1", "effect": "NoExecute"}),
    "attributes": _group(attributes={"rail": {"int": -3}, "rack": {"string": ""}, "_up": {"bool": False}}),
    "attribute-bytes": _group(attributes={"rack": {"string": "ü" * 32}, "Sharing": {"int": 1}}),
    "version": _group(attributes={"firmware": {"version": "1.2.3-rc.1+b7"}}),
    "health": _group(health={"xids": [{"xid": 48, "effect": "None"}], "temperatureCelsius": 30}),
    "capabilities": _group(driverCapabilities=["compute", "utility"]),
    "interval": _group(telemetryIntervalSeconds=3600),
    "by-uuid": _group(match={"uuid": _UUID}, **_SLICE),
    "by-address": _group(match={"pciAddress": "00000000:65:00.0", "product": "NVIDIA A100*"}, **_SLICE),
    "two-groups": {"gpus": [_SLICE, {"match": {"uuid": _UUID}, **_SLICE}], "weight": 1000},
    "labels": {"gpus": [_SLICE], "nodeSelector": {"matchLabels": {"pool": "a", "zone": ""}}},
    "in": _expression("pool", "In", "a", "b"),
    "exists": _expression("example.com/gpu", "Exists"),
}  # fmt: skip

REFUSED: dict[str, tuple[Spec, str]] = {
    "no-gpus": ({}, "gpus"),
    "no-group": ({"gpus": []}, "gpus"),
    "empty-group": ({"gpus": [{}]}, "a group must have one of"),
    "only-match": (_group(match={"uuid": _UUID}), "a group must have one of"),
    "33-groups": (
        {"gpus": [{"match": {"product": f"a{number}"}, **_SLICE} for number in range(33)]},
        "gpus",
    ),
    "same-match": ({"gpus": [_SLICE, {"timeSlice": "Long"}]}, "same match"),
    "uuid": (_group(match={"uuid": "GPU-1"}, **_SLICE), "uuid"),
    "address": (_group(match={"pciAddress": "65:00"}, **_SLICE), "pciAddress"),
    "address-long": (_group(match={"pciAddress": "000000000:65:00.0"}, **_SLICE), "pciAddress"),
    "product-empty": (_group(match={"product": ""}, **_SLICE), "product"),
    "product-long": (_group(match={"product": "x" * 129}, **_SLICE), "product"),
    "no-strategy": (_group(sharing={"enforcement": "none"}), "strategy"),
    "strategy": (_group(sharing={"strategy": "Shares", "shares": 2}), "strategy"),
    "shares-missing": (_group(sharing={"strategy": "shares"}), "shares is needed"),
    "shares-extra": (_group(sharing={"strategy": "memory", "shares": 2}), "must be absent"),
    "shares-0": (_group(sharing={"strategy": "shares", "shares": 0}), "shares"),
    "shares-1001": (_group(sharing={"strategy": "shares", "shares": 1001}), "shares"),
    "enforcement": (_group(sharing={"strategy": "memory", "enforcement": "hard"}), "enforcement"),
    "mig-mode": (_group(mig={"mode": "mixed"}), "mode"),
    "layout-dynamic": (_group(mig={"mode": "dynamic", "layout": {"1g.5gb": 1}}), "mode static only"),
    "layout-empty": (_group(mig={"mode": "static", "layout": {}}), "layout"),
    "layout-many": (_group(mig={"mode": "static", "layout": {"1g.5gb": 7, "2g.10gb": 2}}), "more than 8"),
    "layout-name": (_group(mig={"mode": "static", "layout": {"all-1g.5gb": 1}}), "layout"),
    "layout-none": (_group(mig={"mode": "static", "layout": {"1g.5gb": 0}}), "layout"),
    "reserved-value": (_group(reserved={"value": "not a label"}), "value"),
    "reserved-effect": (_group(reserved={"effect": "PreferNoSchedule"}), "effect"),
    "attribute-two": (_group(attributes={"rail": {"int": 1, "string": "x"}}), "exactly one of string"),
    "attribute-none": (_group(attributes={"rail": {}}), "exactly one of string"),
    "attribute-name": (_group(attributes={"a-b": {"int": 1}}), "attributes"),
    "attribute-long": (_group(attributes={"rack": {"string": "x" * 65}}), "string"),
    "attribute-bytes": (_group(attributes={"rack": {"string": "ü" * 33}}), "more than 64 bytes"),
    "attribute-own": (_group(attributes={"sharing": {"string": "shares"}}), "the driver sets the attributes"),
    "attribute-version": (_group(attributes={"v": {"version": "1.2"}}), "version"),
    "attribute-many": (_group(attributes={f"a{number}": {"int": 1} for number in range(9)}), "attributes"),
    "xid": (_group(health={"xids": [{"xid": 0, "effect": "None"}]}), "xid"),
    "xid-effect": (_group(health={"xids": [{"xid": 48, "effect": "Never"}]}), "effect"),
    "temperature": (_group(health={"temperatureCelsius": 20}), "temperatureCelsius"),
    "time-slice": (_group(timeSlice="short"), "timeSlice"),
    "capability": (_group(driverCapabilities=["cuda"]), "driverCapabilities"),
    "no-capability": (_group(driverCapabilities=[]), "driverCapabilities"),
    "interval": (_group(telemetryIntervalSeconds=0), "telemetryIntervalSeconds"),
    "weight": ({"gpus": [_SLICE], "weight": 1001}, "weight"),
    "in-nothing": (_expression("pool", "In"), "values are needed with In"),
    "exists-with": (_expression("pool", "Exists", "a"), "must be absent"),
    "operator": (_expression("pool", "Gt", "1"), "operator"),
    "no-key": (_expression("", "Exists"), "key"),
}
