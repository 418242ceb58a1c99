"""Fractions of GPUs in pods and pod templates become claims."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.api.fraction_pods import POD_PATHS, rewrite
from dra.api.fractions import ANNOTATION, LABEL, Ask, FractionRules, asks_of_pod
from dra.cel import compile_selector
from dra.errors import ClaimError
from dra.sim.apiserver.patch import json_patch

RULES = FractionRules()
FIFTH = Ask(shares=20, of=100)


def container(name="main", limits=None, requests=None, **more):
    resources = {
        key: value for key, value in (("limits", limits), ("requests", requests)) if value is not None
    }
    return {"name": name, "image": "busybox", **({"resources": resources} if resources else {}), **more}


def pod(*containers, **spec):
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "ns"},
        "spec": {"containers": list(containers) or [container(limits={"nvidia.com/gpu": "0.2"})], **spec},
    }  # fmt: skip


def workload(kind, template):
    obj = {"apiVersion": "x", "kind": kind, "metadata": {"name": "w"}}
    inner = obj
    for part in POD_PATHS[kind][:-1]:
        inner = inner.setdefault(part, {})
    inner["template"] = {key: template[key] for key in ("metadata", "spec") if key in template}
    return obj


def admitted(obj, rules=RULES):
    """Give the object as the API server has it after the patch."""
    before = copy.deepcopy(obj)
    patch = rewrite(obj, rules)
    assert obj == before
    return json_patch(json.loads(json.dumps(obj)), patch)


def template_of(obj):
    for part in POD_PATHS[obj["kind"]]:
        obj = obj[part]
    return obj


def refused(obj, rules=RULES):
    with pytest.raises(ClaimError) as caught:
        rewrite(obj, rules)
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("kind", POD_PATHS)
def test_a_fraction_in_any_kind_of_workload_becomes_a_claim_of_so_many_shares(kind):
    made = admitted(pod() if kind == "Pod" else workload(kind, pod()))
    found = template_of(made)
    (main,) = found["spec"]["containers"]
    assert main["resources"] == {"claims": [{"name": "gpudra-main"}]}
    assert found["spec"]["resourceClaims"] == [
        {"name": "gpudra-main", "resourceClaimTemplateName": FIFTH.template_name}
    ]
    assert found["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    assert found["metadata"]["labels"][LABEL] == "true"
    assert asks_of_pod(found["metadata"]["annotations"]) == {FIFTH.template_name: FIFTH}
    assert rewrite(made, RULES) == []


def test_a_template_without_metadata_gets_some():
    bare = pod()
    del bare["metadata"]
    assert admitted(workload("Deployment", bare))["spec"]["template"]["metadata"]["labels"] == {LABEL: "true"}


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("0.2", 20),
        (0.2, 20),
        ("200m", 20),
        ("0.001", 1),
        ("0.999", 100),
        ("0.201", 21),
        ("1e-1", 10),
        ("0.5", 50),
    ],
)
def test_a_fraction_is_rounded_up_to_whole_shares(text, shares):
    made = admitted(pod(container(limits={"nvidia.com/gpu": text})))
    assert made["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] == Ask(shares, 100).template_name


@pytest.mark.parametrize("text", ["1", 1, "8", "1000m", "0", "2.0", "x", "", None])
def test_whole_numbers_and_nonsense_stay_for_the_api_server(text):
    assert rewrite(pod(container(limits={"nvidia.com/gpu": text})), RULES) == []


@pytest.mark.parametrize(
    ("limits", "requests", "code"),
    [
        ({"nvidia.com/gpu": "0.2"}, {"nvidia.com/gpu": "200m"}, None),
        ({"nvidia.com/gpu": "0.2"}, None, None),
        ({"nvidia.com/gpu": "0.2"}, {"nvidia.com/gpu": "0.3"}, "DRA-FRACTION-LIMITS"),
        (None, {"nvidia.com/gpu": "0.2"}, "DRA-FRACTION-LIMITS"),
        ({"nvidia.com/gpu": "1.5"}, None, "DRA-FRACTION-RANGE"),
        ({"nvidia.com/gpu": "-0.2"}, None, "DRA-FRACTION-RANGE"),
        ({"nvidia.com/gpu": "2", "nvidia.com/gpumem": "100"}, None, "DRA-FRACTION-RANGE"),
        ({"nvidia.com/gpumem": "-1"}, None, "DRA-FRACTION-MEMORY"),
        ({"nvidia.com/gpumem": "99999999999999999"}, None, "DRA-FRACTION-MEMORY"),
        ({"nvidia.com/gpumem": "1500m"}, None, "DRA-FRACTION-MEMORY"),
        # The outcomes of whole numbers are the API server's own.
        ({"nvidia.com/gpu": "1"}, {"nvidia.com/gpu": "2"}, None),
        (None, {"nvidia.com/gpu": "1"}, None),
    ],
)
def test_limits_and_requests_agree_as_for_every_extended_resource(limits, requests, code):
    wanted = pod(container(limits=limits, requests=requests))
    if code is None:
        admitted(wanted)
        return
    error = refused(wanted)
    assert error.code == code
    assert str(error.fields["field"]).startswith("spec.containers[0].resources")


def test_other_resources_and_claims_of_the_pod_stay():
    mine = {"name": "mine", "resourceClaimName": "mine"}
    both = container(
        limits={"nvidia.com/gpu": "0.2", "cpu": "2"}, requests={"nvidia.com/gpu": "0.2", "memory": "1Gi"}
    )
    both["resources"]["claims"] = [{"name": "mine"}]
    made = admitted(pod(both, resourceClaims=[mine], tolerations=[{"operator": "Exists"}]))
    assert made["spec"]["containers"][0]["resources"] == {
        "limits": {"cpu": "2"}, "requests": {"memory": "1Gi"}, "claims": [{"name": "mine"}, {"name": "gpudra-main"}],
    }  # fmt: skip
    assert [each["name"] for each in made["spec"]["resourceClaims"]] == ["mine", "gpudra-main"]
    assert made["spec"]["tolerations"] == [{"operator": "Exists"}]


def test_each_container_has_a_claim_of_its_own_and_equal_amounts_one_template():
    fifth = {"nvidia.com/gpu": "0.2"}
    made = admitted(
        pod(container("a", fifth), container("b", fifth), container("c", {"nvidia.com/gpu": "0.5"}))
    )
    claims = {each["name"]: each["resourceClaimTemplateName"] for each in made["spec"]["resourceClaims"]}
    half = Ask(50, 100).template_name
    assert claims == {"gpudra-a": FIFTH.template_name, "gpudra-b": FIFTH.template_name, "gpudra-c": half}
    assert set(json.loads(made["metadata"]["annotations"][ANNOTATION])) == {FIFTH.template_name, half}


def test_an_init_container_shares_the_claim_of_a_container_that_gets_as_much_and_a_sidecar_does_not():
    fifth = {"nvidia.com/gpu": "0.2"}
    made = admitted(
        pod(
            container("main", fifth),
            initContainers=[
                container("prepare", fifth),
                container("side", fifth, restartPolicy="Always"),
                container("small", {"nvidia.com/gpu": "0.1"}),
            ],
        )
    )
    used = {each["name"]: each["resources"]["claims"] for each in made["spec"]["initContainers"]}
    assert used == {
        "prepare": [{"name": "gpudra-main"}], "side": [{"name": "gpudra-side"}], "small": [{"name": "gpudra-small"}],
    }  # fmt: skip
    assert [each["name"] for each in made["spec"]["resourceClaims"]] == [
        "gpudra-main",
        "gpudra-side",
        "gpudra-small",
    ]


@pytest.mark.parametrize(
    ("limits", "ask"),
    [
        ({"nvidia.com/gpumem": 3000}, Ask(memory_mib=3000)),
        ({"nvidia.com/gpumem": "3000"}, Ask(memory_mib=3000)),
        ({"nvidia.com/gpumem": "4Gi"}, Ask(memory_mib=4096)),
        ({"nvidia.com/gpumem": "1G"}, Ask(memory_mib=954)),
        # As the API server writes 3000, 12500 and 0.5Gi.
        ({"nvidia.com/gpumem": "3k"}, Ask(memory_mib=3000)),
        ({"nvidia.com/gpumem": "12500"}, Ask(memory_mib=12500)),
        ({"nvidia.com/gpumem": "512Mi"}, Ask(memory_mib=512)),
        ({"nvidia.com/gpu": "1", "nvidia.com/gpumem": "3000"}, Ask(memory_mib=3000)),
        ({"nvidia.com/gpu": "0.2", "nvidia.com/gpumem": "3000"}, Ask(20, 100, 3000)),
    ],
)
def test_memory_is_asked_for_on_cards_that_are_shared_by_memory(limits, ask):
    made = admitted(pod(container(limits=limits)))
    assert asks_of_pod(made["metadata"]["annotations"]) == {ask.template_name: ask}
    assert "limits" not in made["spec"]["containers"][0]["resources"]


def test_the_names_of_resources_and_the_number_of_shares_are_the_administrators():
    rules = FractionRules(frozenset({"example.com/card"}), frozenset({"example.com/mem"}), 8)
    made = admitted(pod(container(limits={"example.com/card": "0.3", "nvidia.com/gpu": "0.2"})), rules)
    assert asks_of_pod(made["metadata"]["annotations"]).popitem()[1] == Ask(3, 8)
    assert made["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "0.2"}


def test_whole_numbers_of_another_name_are_the_api_servers_too_and_memory_is_not():
    rules = FractionRules(frozenset({"example.com/card"}), frozenset({"example.com/mem"}), 8)
    assert rewrite(pod(container(requests={"example.com/card": "1"})), rules) == []
    assert refused(pod(container(requests={"example.com/mem": "1"})), rules).code == "DRA-FRACTION-LIMITS"


def test_an_update_that_writes_the_fraction_again_changes_the_amount_and_adds_nothing():
    first = admitted(workload("Deployment", pod()))
    again = copy.deepcopy(first)
    # What kubectl apply makes of the manifest and of what is stored.
    again["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "0.2"}
    assert admitted(again) == first
    more = copy.deepcopy(first)
    more["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "0.5"}
    made = template_of(admitted(more))
    assert made["spec"]["resourceClaims"] == [
        {"name": "gpudra-main", "resourceClaimTemplateName": Ask(50, 100).template_name}
    ]
    assert set(asks_of_pod(made["metadata"]["annotations"])) == {Ask(50, 100).template_name}


def test_an_update_to_whole_gpus_takes_the_claim_away():
    made = admitted(workload("Deployment", pod()))
    made["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] = {"nvidia.com/gpu": "1"}
    whole = template_of(admitted(made))
    assert whole["spec"]["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert "resourceClaims" not in whole["spec"]
    assert "labels" not in whole["metadata"]


def test_a_long_name_of_a_container_gives_a_short_one_of_its_claim():
    names = ["a" * 63, "a" * 62 + "b"]
    made = admitted(pod(*(container(name, {"nvidia.com/gpu": "0.2"}) for name in names)))
    claims = [each["name"] for each in made["spec"]["resourceClaims"]]
    assert len(set(claims)) == 2
    assert all(len(name) <= 63 for name in claims)


@pytest.mark.parametrize("ask", [FIFTH, Ask(memory_mib=512), Ask(1, 3, 7)])
def test_a_templates_content_is_a_claim_that_the_api_server_takes_and_cel_reads(ask):
    from dra.diagnose.validate import validate_manifests
    from dra.diagnose.validate_source import manifest_of

    template = ask.template("ns")
    report = validate_manifests([manifest_of(template)], known_devices=lambda: ())
    assert [finding for finding in report.findings if finding.severity == "error"] == []
    (request,) = ask.claim_spec()["devices"]["requests"]
    (selector,) = request["exactly"]["selectors"]
    compiled = compile_selector(selector["cel"]["expression"])
    kind = "shares" if ask.shares else "memory"
    fits = {
        "attributes": {"gpudra.dev/sharing": {"string": kind}, "gpudra.dev/replicas": {"int": ask.of or 5}}
    }
    assert compiled.evaluate({"name": "gpu-0", **fits}, driver="gpu.nvidia.com")
    assert not compiled.evaluate({"name": "gpu-0", "attributes": {}}, driver="gpu.nvidia.com")


def test_a_name_that_is_not_that_of_its_content_is_refused():
    forged = {ANNOTATION: json.dumps({FIFTH.template_name: Ask(100, 100).content()})}
    with pytest.raises(ClaimError, match="DRA-SHARE-CONTENT"):
        asks_of_pod(forged)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["0.2", "1", "nvidia.com/gpu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from([
            "name", "resources", "limits", "requests", "claims", "nvidia.com/gpu", "nvidia.com/gpumem", "restartPolicy",
        ]) | st.text(max_size=5), inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(
    spec=st.dictionaries(
        st.sampled_from(["containers", "initContainers", "resourceClaims", "tolerations"]), JSON
    ),
    meta=JSON,
)
def test_any_json_in_place_of_a_pod_is_a_patch_or_a_clear_error(spec, meta):
    obj = {"kind": "Pod", "metadata": meta, "spec": spec}
    try:
        patch = rewrite(obj, RULES)
    except ClaimError as error:
        assert error.remedy
    else:
        json.dumps(patch)


@given(st.lists(st.integers(1, 999), min_size=1, max_size=5))
def test_rewriting_is_idempotent_for_any_fractions(thousandths):
    wanted = pod(*(container(f"c{n}", {"nvidia.com/gpu": f"{part}m"}) for n, part in enumerate(thousandths)))
    made = admitted(wanted)
    assert rewrite(made, RULES) == []
    assert len(made["spec"]["resourceClaims"]) == len(thousandths)
