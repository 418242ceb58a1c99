"""GpuNodePolicy: what is valid, and what several policies mean for a node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.api.gpu_settings import GpuIdentity, MigSettings, SharingSettings, parse_sharing
from dra.api.policy import conflicts_in_words, decode_policy, resolve
from dra.errors import ConfigError, DraError
from dra.values import PciAddress

A100 = GpuIdentity(
    "GPU-00000000-0000-0000-0000-000000000001", "NVIDIA A100-SXM4-40GB", PciAddress.parse("0000:07:00.0")
)
L4 = GpuIdentity("GPU-00000000-0000-0000-0000-000000000002", "NVIDIA L4", PciAddress.parse("0000:65:00.0"))


def policy(name="p", gpus=None, *, created="2026-01-01T00:00:00Z", **spec):
    return {
        "apiVersion": "gpudra.dev/v1alpha1",
        "kind": "GpuNodePolicy",
        "metadata": {"name": name, "generation": 3, "creationTimestamp": created},
        "spec": {"gpus": [{"sharing": {"strategy": "memory"}}] if gpus is None else gpus, **spec},
    }


def shares(number, **match):
    return {"match": match, "sharing": {"strategy": "shares", "shares": number}}


def resolved(*policies, labels=None, base=None):
    extra = {} if base is None else {"base": base}
    return resolve([decode_policy(each) for each in policies], labels=labels or {}, gpus=[A100, L4], **extra)


def test_every_block_reaches_the_settings():
    body = policy(
        gpus=[
            {
                "match": {"product": "nvidia-a100*"},
                "sharing": {"strategy": "shares", "shares": 10, "enforcement": "required"},
                "mig": {"mode": "static", "layout": {"3g.20gb": 1, "1g.5gb": 4}},
                "reserved": {"value": "batch", "effect": "NoExecute"},
                "attributes": {"rail": {"int": 3}, "rack": {"string": "a7"}, "fast": {"bool": True}},
                "health": {"xids": [{"xid": 48, "effect": "NoExecute"}], "temperatureCelsius": 90},
                "timeSlice": "Short",
                "driverCapabilities": ["compute", "graphics"],
                "telemetryIntervalSeconds": 15,
            }
        ]
    )
    settings = resolved(body).settings.of(A100)
    assert settings.sharing == SharingSettings("shares", 10, "required")
    assert settings.mig == MigSettings("static", (("1g.5gb", 4), ("3g.20gb", 1)))
    assert (settings.reserved.value, settings.reserved.effect) == ("batch", "NoExecute")
    assert settings.attributes == {"rail": {"int": 3}, "rack": {"string": "a7"}, "fast": {"bool": True}}
    assert settings.health.xids == {48: "NoExecute"}
    assert settings.health.temperature_celsius == 90
    assert settings.time_slice == "Short"
    assert settings.driver_capabilities == ("compute", "graphics")
    assert settings.telemetry_interval_seconds == 15
    assert resolved(body).settings.of(L4).sharing.strategy == "exclusive"


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"gpus": []}, "spec.gpus"),
        ({"gpus": [{}]}, "spec.gpus.0: a group must have one of"),
        ({"gpus": [{"match": {"index": 0}, "timeSlice": "Long"}]}, "spec.gpus.0.match.index"),
        ({"gpus": [{"match": {"uuid": "GPU-1"}, "timeSlice": "Long"}]}, "spec.gpus.0.match.uuid"),
        ({"gpus": [{"match": {"pciAddress": "65:00"}, "timeSlice": "Long"}]}, "spec.gpus.0.match.pciAddress"),
        ({"gpus": [{"sharing": {"strategy": "shares"}}]}, "spec.gpus.0.sharing: shares is needed"),
        ({"gpus": [{"sharing": {"strategy": "memory", "shares": 2}}]}, "spec.gpus.0.sharing"),
        ({"gpus": [{"sharing": {"strategy": "shares", "shares": 1001}}]}, "spec.gpus.0.sharing.shares"),
        ({"gpus": [{"sharing": {"strategy": "Shares", "shares": 2}}]}, "spec.gpus.0.sharing.strategy"),
        ({"gpus": [{"mig": {"mode": "dynamic", "layout": {"1g.5gb": 1}}}]}, "spec.gpus.0.mig: layout is for"),
        ({"gpus": [{"mig": {"mode": "static", "layout": {"1g.5gb": 7, "2g.10gb": 3}}}]}, "more than 8"),
        ({"gpus": [{"mig": {"mode": "static", "layout": {"big": 1}}}]}, "spec.gpus.0.mig.layout"),
        ({"gpus": [{"mig": {"mode": "static", "layout": {"1g.5gb": 0}}}]}, "spec.gpus.0.mig.layout"),
        ({"gpus": [{"attributes": {"rail": {"int": 1, "string": "x"}}}]}, "exactly one of string"),
        ({"gpus": [{"attributes": {"rail": {}}}]}, "exactly one of string"),
        ({"gpus": [{"attributes": {"a-b": {"int": 1}}}]}, "spec.gpus.0.attributes"),
        ({"gpus": [{"attributes": {"v": {"version": "1.2"}}}]}, "spec.gpus.0.attributes.v.version"),
        ({"gpus": [{"driverCapabilities": ["cuda"]}]}, "spec.gpus.0.driverCapabilities.0"),
        ({"gpus": [{"reserved": {"value": "not a label"}}]}, "spec.gpus.0.reserved.value"),
        ({"gpus": [{"timeSlice": "Short"}], "weight": -1}, "spec.weight"),
        ({"gpus": [{"timeSlice": "Short"}], "weight": "5"}, "spec.weight"),
        ({"gpus": [{"timeSlice": "Short"}], "nodeselector": {}}, "spec.nodeselector"),
        (
            {
                "gpus": [{"timeSlice": "Short"}],
                "nodeSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]},
            },
            "values are needed with In",
        ),
        ({"gpus": [{"timeSlice": "Short"}, {"sharing": {"strategy": "memory"}}]}, "the same match"),
    ],
)
def test_a_bad_policy_is_named_with_the_field(spec, path):
    body = policy("bad")
    body["spec"] = spec
    with pytest.raises(ConfigError) as caught:
        decode_policy(body)
    assert caught.value.code == "DRA-POLICY-INVALID"
    assert "GpuNodePolicy bad" in str(caught.value)
    assert path in str(caught.value)
    assert caught.value.remedy


def test_null_means_absent_and_a_policy_without_name_or_spec_is_refused():
    assert decode_policy(policy(gpus=[{"match": None, "mig": None, "timeSlice": "Long"}], weight=None)).layers
    for broken in ({}, {"metadata": {"name": "x"}}, {**policy(), "spec": None}, {**policy(), "kind": "Pod"}):
        with pytest.raises(ConfigError):
            decode_policy(broken)


def test_more_requirements_then_weight_then_the_exact_gpu_decide():
    everywhere = policy("everywhere", [shares(2)], weight=900)
    pool = policy("pool", [shares(3)], nodeSelector={"matchLabels": {"pool": "a"}})
    heavy = policy(
        "heavy",
        [shares(4), shares(5, uuid=A100.uuid), shares(6, product="NVIDIA*")],
        nodeSelector={"matchExpressions": [{"key": "pool", "operator": "Exists"}]},
        weight=1,
    )
    found = resolved(everywhere, heavy, pool, labels={"pool": "a"})
    assert found.policies == ("heavy", "pool", "everywhere")
    assert found.settings.of(A100).sharing.shares == 5
    assert found.settings.of(L4).sharing.shares == 6
    assert found.conflicts == ()
    assert resolved(everywhere, heavy, pool, labels={"pool": "b"}).policies == ("heavy", "everywhere")
    assert resolved(everywhere, heavy, pool).settings.of(L4).sharing.shares == 2


def test_a_block_is_taken_as_a_whole_and_others_stay_with_the_lesser_policy():
    below = policy("below", [{"sharing": {"strategy": "shares", "shares": 4, "enforcement": "none"}}])
    above = policy("above", [{"match": {"product": "*l4"}, "sharing": {"strategy": "memory"}}], weight=2)
    slice_ = policy("slice", [{"timeSlice": "Long"}], weight=1)
    found = resolved(above, below, slice_, base=parse_sharing("7")).settings
    assert found.of(L4).sharing == SharingSettings("memory")
    assert found.of(A100).sharing == SharingSettings("shares", 4, "none")
    assert found.of(L4).time_slice == "Long"
    assert found.source_of(L4, "sharing") == "GpuNodePolicy above"
    assert resolved(base=parse_sharing("7")).settings.of(L4).sharing.shares == 7


def test_two_equal_policies_that_differ_are_a_conflict_which_the_older_wins_whatever_the_order():
    old = policy("zz-old", [shares(2)], created="2026-01-01T00:00:00Z")
    new = policy("aa-new", [shares(3)], created="2026-02-01T00:00:00Z")
    for pair in ((old, new), (new, old)):
        found = resolved(*pair)
        assert found.settings.of(L4).sharing.shares == 2
        assert [(each.winner, each.loser, each.block) for each in found.conflicts] == [
            ("zz-old", "aa-new", "sharing")
        ] * 2
        ((key, said),) = conflicts_in_words(found.conflicts).items()
        assert key == ("zz-old", "aa-new", "sharing")
        assert "zz-old, counts" in said
    same = policy("aa-new", [shares(2)], created="2026-02-01T00:00:00Z")
    assert resolved(old, same).conflicts == ()
    apart = policy("aa-new", [shares(3, product="NVIDIA L4")], created="2026-02-01T00:00:00Z")
    assert [each.gpu for each in resolved(old, apart).conflicts] == [L4]


@pytest.mark.parametrize(
    ("expression", "labels", "chosen"),
    [
        ({"key": "a", "operator": "In", "values": ["1", "2"]}, {"a": "2"}, True),
        ({"key": "a", "operator": "In", "values": ["1"]}, {}, False),
        ({"key": "a", "operator": "NotIn", "values": ["1"]}, {}, True),
        ({"key": "a", "operator": "NotIn", "values": ["1"]}, {"a": "1"}, False),
        ({"key": "a", "operator": "Exists"}, {"a": ""}, True),
        ({"key": "a", "operator": "DoesNotExist"}, {"a": ""}, False),
    ],
)
def test_node_selectors_mean_what_they_mean_in_kubernetes(expression, labels, chosen):
    body = policy(nodeSelector={"matchExpressions": [expression]})
    assert bool(resolved(body, labels=labels).policies) is chosen


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["gpus", "match", "sharing", "strategy", "shares", "mig", "mode", "layout", "weight", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_spec_is_a_policy_or_a_clear_error(spec):
    try:
        decode_policy({**policy(), "spec": spec})
    except DraError as error:
        assert error.code == "DRA-POLICY-INVALID"
        assert error.remedy


def test_the_definitions_on_disk_are_those_of_the_models():
    import importlib.util

    folder = Path(__file__).parents[3] / "crds"
    found = importlib.util.spec_from_file_location("crds_generate", folder / "generate.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    for name, text in module.rendered().items():
        assert (folder / name).read_text() == text, f"{name} is old: run `make crds`"


def test_the_schema_is_structural():
    from dra.api.policy_crd import node_crd, policy_crd

    for body in (policy_crd(), node_crd()):
        text = json.dumps(body)
        for word in ("$ref", "anyOf", "oneOf", '"title"', '"null"', '"additionalProperties": false'):
            assert word not in text, word


def test_a_whole_number_may_be_written_with_a_point_as_json_allows():
    found = resolved(policy("p", [{"sharing": {"strategy": "shares", "shares": 2.0}}]))
    assert found.settings.of(L4).sharing.shares == 2
    with pytest.raises(ConfigError):
        decode_policy(policy("p", [{"sharing": {"strategy": "shares", "shares": 2.5}}]))
