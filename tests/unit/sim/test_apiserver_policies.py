"""ValidatingAdmissionPolicies: on the simulated API server and, where `KUBEBUILDER_ASSETS` has one, on a real one."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dra.sim.apiserver import SimApiServer
from dra.sim.apiserver.exchange import Request
from dra.sim.apiserver.identity import PLUGIN, plugin_of
from tests.real_api import RealApi
from tests.real_apiserver import needs_real_apiserver, real_apiserver
from tests.yaml_text import read_all

Json = dict[str, Any]
ROOT = Path(__file__).parents[3]
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
POLICIES = f"{ADMISSION}/validatingadmissionpolicies"
BINDINGS = f"{ADMISSION}/validatingadmissionpolicybindings"
CONFIGMAPS = "/api/v1/namespaces/default/configmaps"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
SECONDS = 60.0


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealApi]:
    with real_apiserver(tmp_path_factory.mktemp("apiserver")) as running:
        yield RealApi(running)


@pytest.fixture(params=["simulated", pytest.param("real", marks=needs_real_apiserver)])
def server(request: pytest.FixtureRequest) -> Iterator[SimApiServer | RealApi]:
    if request.param == "simulated":
        yield SimApiServer()
        return
    api = request.getfixturevalue("real")
    yield api
    api.clean()


def rules(resource: str = "configmaps", group: str = "", version: str = "v1", *operations: str) -> Json:
    return {
        "apiGroups": [group],
        "apiVersions": [version],
        "operations": list(operations or ("CREATE", "UPDATE", "DELETE")),
        "resources": [resource],
    }


def policy(name: str, *validations: Json | str, **spec: Any) -> Json:
    """A policy on the ConfigMaps whose names begin with its own."""
    mine = f"(object == null ? oldObject : object).metadata.name.startsWith('{name}')"
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "matchConstraints": {"resourceRules": [rules()]},
            "matchConditions": [{"name": "mine", "expression": mine}],
            "validations": [{"expression": one} if isinstance(one, str) else one for one in validations],
            **spec,
        },
    }


def binding(name: str, *actions: str, **spec: Any) -> Json:
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": f"to-{name}"},
        "spec": {"policyName": name, "validationActions": list(actions or ("Deny",)), **spec},
    }


def configmap(name: str, **data: str) -> Json:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def install(server: Any, *objects: Json, denies: Json | None = None, at: str = CONFIGMAPS) -> None:
    """Create policies and bindings; they act (a real server takes seconds) when `denies` is refused."""
    for obj in objects:
        server.create(POLICIES if obj["kind"].endswith("Policy") else BINDINGS, obj)
    end = time.monotonic() + SECONDS
    while denies is not None and server.request("POST", f"{at}?dryRun=All", denies)[0] == 201:
        assert time.monotonic() < end, "the policy does not act"
        time.sleep(0.2)


def refusal(name: str, text: str) -> str:
    return f"ValidatingAdmissionPolicy '{name}' with binding 'to-{name}' denied request: {text}"


VALIDATIONS: list[Json] = [
    {"expression": "variables.kind != 'x'", "message": "no x"},
    {
        "expression": "variables.kind != 'y'",
        "messageExpression": "'kind ' + variables.kind + ' of ' + object.metadata.name",
        "reason": "Forbidden",
    },
    {"expression": "variables.kind != 'z' || variables.bad == ''"},
    {"expression": "variables.kind != 'w'"},
    {"expression": "variables.kind != 'v'", "messageExpression": "string(variables.bad)", "message": "no v"},
    {"expression": "variables.kind != 'u'", "reason": "RequestEntityTooLarge", "message": "too much"},
    {
        "expression": "variables.kind != 't'",
        "messageExpression": "namespaceObject.metadata.name + request.operation + string(request.dryRun) + request.namespace",
    },
]
VARIABLES = [
    {"name": "kind", "expression": "has(object.data) ? object.data.?k.orValue('none') : 'nothing'"},
    {"name": "bad", "expression": "object.data.missing"},
]


def test_what_a_policy_says_is_the_answer_with_its_reason(server) -> None:
    made = policy("words", *VALIDATIONS, variables=VARIABLES)
    install(server, made, binding("words"), denies=configmap("words-x", k="x"))
    missing = "expression 'variables.kind != 'z' || variables.bad == ''' resulted in error: composited variable \"bad\""
    for kind, code, reason, text in [
        ("x", 422, "Invalid", "no x"),
        ("y", 403, "Forbidden", "kind y of words-y"),
        ("z", 422, "Invalid", f"{missing} fails to evaluate: no such key: missing"),
        ("w", 422, "Invalid", "failed expression: variables.kind != 'w'"),
        ("v", 422, "Invalid", "no v"),
        ("u", 413, "RequestEntityTooLarge", "too much"),
        ("t", 422, "Invalid", "defaultCREATEfalsedefault"),
    ]:
        status, answer = server.request("POST", CONFIGMAPS, configmap(f"words-{kind}", k=kind))
        assert (status, answer["code"], answer["reason"]) == (code, code, reason)
        said = refusal("words", text)
        assert answer["message"] == f'configmaps "words-{kind}" is forbidden: {said}'
        assert answer["details"]["causes"] == [{"message": said}]
    status, answer = server.request("POST", CONFIGMAPS, configmap("words-good", k="good"))
    assert status == 201, answer
    patch = {"data": {"k": "x"}}
    status, answer = server.request(
        "PATCH", f"{CONFIGMAPS}/words-good", patch, content_type="application/merge-patch+json"
    )
    assert (status, answer["details"]["causes"]) == (422, [{"message": refusal("words", "no x")}])
    # Without an object `kind` is `nothing`, which all validations take.
    assert server.request("DELETE", f"{CONFIGMAPS}/words-good")[0] == 200
    assert server.request("POST", CONFIGMAPS, configmap("other", k="x"))[0] == 201


def test_failures_deny_or_are_ignored_as_the_policy_says(server) -> None:
    boom = [{"name": "boom", "expression": "object.metadata.name == 'fail-boom' && object.nope == 1"}]
    mine = [{"name": "mine", "expression": "object.metadata.name.startsWith('lax')"}]
    install(
        server,
        policy("fail", "true", matchConditions=boom),
        policy("lax", "object.nope == 1", "object.data.k != 'no'", matchConditions=mine, failurePolicy="Ignore"),
        binding("fail"),
        binding("lax"),
        denies=configmap("lax-no", k="no"),
    )  # fmt: skip
    install(server, denies=configmap("fail-boom"))
    status, answer = server.request("POST", CONFIGMAPS, configmap("fail-boom"))
    text = f"expression '{boom[0]['expression']}' resulted in error: no such key: nope"
    assert (status, answer["details"]["causes"]) == (422, [{"message": refusal("fail", text)}])
    assert server.request("POST", CONFIGMAPS, configmap("fail-not"))[0] == 201
    assert server.request("POST", CONFIGMAPS, configmap("lax-yes", k="yes"))[0] == 201


def test_a_policy_that_costs_too_much_is_stopped(server) -> None:
    loops = "lists.range(10000).all(x, lists.range(1000).all(y, x+y >= 0))"
    install(server, policy("cost", loops), binding("cost"), denies=configmap("cost-a"))
    _, answer = server.request("POST", CONFIGMAPS, configmap("cost-a"))
    text = f"expression '{loops}' resulted in error: operation cancelled: actual cost limit exceeded"
    assert answer["details"]["causes"] == [{"message": refusal("cost", text)}]


def test_rules_of_another_version_exclusions_and_selectors_decide_what_is_judged(server) -> None:
    classes = "/apis/resource.k8s.io/v1/deviceclasses"

    def device_class(name: str, **labels: str) -> Json:
        metadata = {"name": name, "labels": labels}
        return {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": metadata, "spec": {}}

    constraints = {
        "resourceRules": [rules("deviceclasses", "resource.k8s.io", "v1beta1", "*")],
        "excludeResourceRules": [rules("*", "*", "*", "DELETE")],
    }
    seen = "object.apiVersion != 'resource.k8s.io/v1beta1' || object.metadata.name.endsWith('ok')"
    made = policy("match", seen, "namespaceObject == null", matchConstraints=constraints, matchConditions=[])
    limits = {"objectSelector": {"matchLabels": {"team": "a"}}}
    install(
        server, made, binding("match", matchResources=limits), denies=device_class("no", team="a"), at=classes
    )
    assert server.request("POST", classes, device_class("no", team="a"))[0] == 422
    assert server.request("POST", classes, device_class("a-ok", team="a"))[0] == 201
    assert server.request("POST", classes, device_class("no", team="b"))[0] == 201
    for name in ("a-ok", "no"):
        assert server.request("DELETE", f"{classes}/{name}")[0] == 200


def test_the_charts_policy_keeps_a_plugin_to_the_slices_of_its_node(server) -> None:
    def a_slice(name: str, node: str) -> Json:
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": "gpu.nvidia.com", "nodeName": node, "pool": pool, "devices": []}
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": name},
            "spec": spec,
        }

    def as_plugin(node: str = "") -> dict[str, str]:
        bound = {"Impersonate-Extra-authentication.kubernetes.io%2Fnode-name": node} if node else {}
        return {"Impersonate-User": PLUGIN, "Impersonate-Group": "system:masters", **bound}

    text = (ROOT / "deploy" / "manifests" / "admission-policy.yaml").read_text(encoding="utf-8")
    install(server, *read_all(text))
    name = "dra-driver-nvidia-gpu-own-slices"
    end = time.monotonic() + SECONDS
    while True:
        status, answer = server.request(
            "POST", f"{SLICES}?dryRun=All", a_slice("s1", "n1"), headers=as_plugin("n2")
        )
        if status != 201:
            break
        assert time.monotonic() < end
        time.sleep(0.2)
    said = f"ValidatingAdmissionPolicy '{name}' with binding '{name}' denied request: "
    assert status == 422
    assert answer["details"]["causes"][0]["message"] == (
        f"{said}the plugin of node 'n2' may not change a slice of node 'n1'"
    )
    _, answer = server.request("POST", SLICES, a_slice("s1", "n1"), headers=as_plugin())
    assert answer["details"]["causes"][0]["message"] == (
        f"{said}the token is not bound to a node; run the plugin as a pod with its projected token"
    )
    assert server.request("POST", SLICES, a_slice("s1", "n1"), headers=as_plugin("n1"))[0] == 201
    assert server.request("DELETE", f"{SLICES}/s1", headers=as_plugin("n2"))[0] == 422
    assert server.request("DELETE", f"{SLICES}/s1", headers=as_plugin("n1"))[0] == 200
    # Nobody else is concerned.
    assert server.request("POST", SLICES, a_slice("s2", "n3"))[0] == 201
    assert server.request("DELETE", f"{SLICES}/s2")[0] == 200


UNDECLARED = (
    "compilation failed: ERROR: <input>:1:1: undeclared reference to '{0}' (in container '')\n | {1}\n | ^"
)
NO_FIELD = "compilation failed: ERROR: <input>:1:{0}: undefined field '{1}'\n | {2}\n | {3}^"
NOPE = "request.nope == 'x'"
ITEM = "validations or auditAnnotations must contain at least one item"
REASONS = '"Forbidden", "Invalid", "RequestEntityTooLarge"'


def expects(expression: str, **more: str) -> Json:
    return {"validations": [{"expression": expression, **more}]}


@pytest.mark.parametrize(
    ("spec", "field", "message"),
    [
        (expects("object.spec.x"), "validations[0].expression", 'Invalid value: "object.spec.x": must evaluate to bool but got dyn'),
        (expects("false", messageExpression="object.x"), "validations[0].messageExpression",
         'Invalid value: "object.x": must evaluate to string but got dyn'),
        (expects("variables.nope == 1"), "validations[0].expression",
         f'Invalid value: "variables.nope == 1": {UNDECLARED.format("variables", "variables.nope == 1")}'),
        (expects("params == null"), "validations[0].expression",
         f'Invalid value: "params == null": {UNDECLARED.format("params", "params == null")}'),
        (expects(NOPE), "validations[0].expression",
         f"Invalid value: \"{NOPE}\": {NO_FIELD.format(8, 'nope', NOPE, '.' * 7)}"),
        ({"variables": [{"name": "a", "expression": "variables.b"}, {"name": "b", "expression": "1"}]},
         "variables[0].expression", f'Invalid value: "variables.b": {NO_FIELD.format(10, "b", "variables.b", "." * 9)}'),
        ({"variables": [{"name": "a-b", "expression": "1"}]}, "variables[0].name",
         'Invalid value: "a-b": must be a valid CEL identifier'),
        (expects(" "), "validations[0].expression", "Required value: expression is not specified"),
        (expects("true", reason="Nope"), "validations[0].reason", f'Unsupported value: "Nope": supported values: {REASONS}'),
        ({"matchConstraints": {"resourceRules": []}}, "matchConstraints.resourceRules", "Required value"),
        ({"failurePolicy": "Maybe"}, "failurePolicy", 'Unsupported value: "Maybe": supported values: "Fail", "Ignore"'),
        ({"validations": []}, "validations", f"Required value: {ITEM}"),
    ],
)  # fmt: skip
def test_a_policy_that_cannot_work_is_refused_at_its_place(
    server, spec: Json, field: str, message: str
) -> None:
    status, answer = server.request("POST", POLICIES, policy("wrong", "true", **spec))
    assert status == 422
    cause = answer["details"]["causes"][0]
    assert (cause["field"], cause["message"]) == (f"spec.{field}", message)


@pytest.mark.parametrize(
    ("actions", "spec", "message"),
    [
        (["Shout"], {}, 'Unsupported value: "Shout": supported values: "Audit", "Deny", "Warn"'),
        (["Warn", "Warn"], {}, 'Duplicate value: "Warn"'),
        (["Deny"], {"policyName": ""}, "Required value"),
        (["Deny"], {"paramRef": {"name": "x"}}, "Required value"),
        (["Deny"], {"validationActions": []}, "Required value: at least one validation action is required"),
    ],
)
def test_a_binding_that_cannot_work_is_refused(server, actions: list[str], spec: Json, message: str) -> None:
    status, answer = server.request("POST", BINDINGS, binding("wrong", *actions, **spec))
    assert (status, answer["details"]["causes"][0]["message"]) == (422, message)


def test_a_warning_lets_the_request_through() -> None:
    server = SimApiServer()
    install(
        server, policy("warn", {"expression": "false", "message": "look"}), binding("warn", "Warn", "Audit")
    )
    body = b'{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "warn-a"}}'
    response = server.api.handle(Request("POST", CONFIGMAPS, {"content-type": "application/json"}, body))
    said = "Validation failed for ValidatingAdmissionPolicy 'warn' with binding 'to-warn': look"
    assert (response.status, response.warnings) == (201, [f'299 - "{said}"'])
    assert server.request("POST", CONFIGMAPS, configmap("warn-b"))[0] == 201


def test_parameters_are_looked_up_and_missed_as_the_binding_says() -> None:
    server = SimApiServer()
    limit: Json = {
        "expression": "params == null || object.data.k == params.data.limit",
        "messageExpression": "'limit of ' + string(params.metadata.name)",
    }
    kind = {"apiVersion": "v1", "kind": "ConfigMap"}
    server.create(CONFIGMAPS, configmap("limit", limit="x"))
    named = {"name": "limit", "parameterNotFoundAction": "Deny"}
    gone = {**named, "name": "gone"}
    install(server, policy("param", limit, paramKind=kind), binding("param", paramRef=gone))
    _, answer = server.request("POST", CONFIGMAPS, configmap("param-a", k="v"))
    missing = (
        "failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction"
    )
    assert answer["details"]["causes"] == [{"message": refusal("param", missing)}]
    server.request("DELETE", f"{BINDINGS}/to-param")
    install(server, binding("param", paramRef=named))
    _, answer = server.request("POST", CONFIGMAPS, configmap("param-a", k="v"))
    assert answer["details"]["causes"] == [{"message": refusal("param", "limit of limit")}]
    assert server.request("POST", CONFIGMAPS, configmap("param-a", k="x"))[0] == 201
    nothing = policy("odd", "params == null", paramKind={"apiVersion": "v1", "kind": "Nothing"})
    install(server, nothing, binding("odd", paramRef=named))
    _, answer = server.request("POST", CONFIGMAPS, configmap("odd-a"))
    assert "failed to find resource referenced by paramKind: '/v1, Kind=Nothing'" in answer["message"]


def test_several_groups_and_a_token_of_a_node_are_seen_as_they_are(tmp_path: Path) -> None:
    server = SimApiServer().start()
    try:
        connection = http.client.HTTPConnection(
            "127.0.0.1", int(server.url.rpartition(":")[2]), timeout=SECONDS
        )
        reviews = "/apis/authentication.k8s.io/v1/selfsubjectreviews"

        def who(*headers: tuple[str, str]) -> Json:
            connection.putrequest("POST", reviews)
            body = b'{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}'
            for name, value in (
                *headers,
                ("Content-Type", "application/json"),
                ("Content-Length", f"{len(body)}"),
            ):
                connection.putheader(name, value)
            connection.endheaders(body)
            return dict(json.loads(connection.getresponse().read())["status"]["userInfo"])

        found = who(("Impersonate-User", "ann"), ("Impersonate-Group", "a"), ("Impersonate-Group", "b"))
        assert found == {"username": "ann", "groups": ["a", "b", "system:authenticated"]}
        config = json.loads(
            server.write_kubeconfig(tmp_path / "k", token=server.token_for(plugin_of("n1"))).read_text()
        )
        found = who(("Authorization", f"Bearer {config['users'][0]['user']['token']}"))
        assert (found["username"], found["extra"]) == (
            PLUGIN,
            {"authentication.kubernetes.io/node-name": ["n1"]},
        )
        assert who()["username"] == "system:admin"
    finally:
        server.stop()
