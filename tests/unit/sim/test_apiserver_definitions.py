"""Custom resources: schemas, defaults, CEL rules, ratcheting, what a definition may say. On the simulated API server and, where
`KUBEBUILDER_ASSETS` has one, on a real one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from dra.sim.apiserver import SimApiServer
from tests.real_api import RealApi
from tests.real_apiserver import needs_real_apiserver, real_apiserver

Json = dict[str, Any]
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
THINGS = "/apis/example.com/v1/things"
MERGE = "application/merge-patch+json"


def definition(spec: Json, *, root: Json | None = None, **more: Any) -> Json:
    """A cluster-scoped definition whose `spec` has this schema."""
    schema = {"type": "object", "properties": {"spec": spec}, **(root or {})}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "things.example.com"},
        "spec": {
            "group": "example.com",
            "scope": "Cluster",
            "names": {"plural": "things", "singular": "thing", "kind": "Thing"},
            "versions": [
                {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}, **more}
            ],
        },
    }


def rules(*texts: str | Json) -> list[Json]:
    return [{"rule": text} if isinstance(text, str) else text for text in texts]


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


def thing(spec: Json, name: str = "t", **more: Any) -> Json:
    return {"apiVersion": "example.com/v1", "kind": "Thing", "metadata": {"name": name, **more}, "spec": spec}


def make(server: SimApiServer, spec: Json, **more: Any) -> tuple[int, Any]:
    return server.request("POST", THINGS, thing(spec, **more))


def change(server: SimApiServer, patch: Json) -> tuple[int, Any]:
    return server.request("PATCH", f"{THINGS}/t", patch, content_type=MERGE)


SHARING = {
    "type": "object",
    "properties": {
        "mode": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "when": {"type": "string", "format": "date-time"},
        "size": {"x-kubernetes-int-or-string": True},
        "foo-bar": {"type": "string"},
        "namespace": {"type": "string"},
        "names": {"type": "array", "maxItems": 150, "items": {"type": "string", "maxLength": 20}},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "parts": {
            "type": "array",
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["id"],
            "items": {
                "type": "object",
                "required": ["id"],
                "properties": {"id": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    },
}


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        ("self.count < 5", {"count": 4}, {"count": 5}),
        ("!has(self.mode) || self.mode in ['a', 'b']", {}, {"mode": "c"}),
        ("self.share > 0.5", {"share": 1}, {"share": 0.25}),
        ("self.when < timestamp('2030-01-01T00:00:00Z')", {"when": "2029-01-01T00:00:00Z"}, {"when": "2031-01-01T00:00:00Z"}),
        ("type(self.size) == int ? self.size > 1 : self.size.endsWith('%')", {"size": "5%"}, {"size": 1}),
        ("self.foo__dash__bar == 'x'", {"foo-bar": "x"}, {"foo-bar": "y"}),
        ("self.__namespace__ == 'x'", {"namespace": "x"}, {"namespace": "y"}),
        ("self.names.all(name, name.matches('^[a-z]+$'))", {"names": ["a"]}, {"names": ["a", "B"]}),
        ("self.labels.exists(key, self.labels[key] == 'x')", {"labels": {"a": "x"}}, {"labels": {"a": "y"}}),
        ("self.parts.map(part, part.n).sum() == 3", {"parts": [{"id": "a", "n": 1}, {"id": "b", "n": 2}]}, {"parts": []}),
        ("self.?mode.orValue('none') == 'none'", {}, {"mode": "c"}),
    ],
)  # fmt: skip
def test_a_rule_sees_the_fields_in_their_types(server, rule: str, good: Json, bad: Json) -> None:
    server.create(DEFINITIONS, definition({**SHARING, "x-kubernetes-validations": rules(rule)}))
    status, answer = make(server, good, name="good")
    assert status == 201, answer
    status, answer = make(server, bad)
    assert status == 422
    assert answer["details"]["causes"] == [
        {"reason": "FieldValueInvalid", "message": f"Invalid value: failed rule: {rule}", "field": "spec"}
    ]


def test_messages_reasons_and_field_paths_of_rules(server) -> None:
    texts = rules(
        {
            "rule": "self.count < 5",
            "messageExpression": "'not %d'.format([self.count])",
            "fieldPath": ".count",
        },
        {
            "rule": "has(self.mode)",
            "message": "say how",
            "reason": "FieldValueRequired",
            "fieldPath": ".mode",
        },
        {"rule": "!has(self.share)", "message": "no shares", "reason": "FieldValueForbidden"},
    )
    server.create(DEFINITIONS, definition({**SHARING, "x-kubernetes-validations": texts}))
    _, answer = make(server, {"count": 7, "share": 1})
    assert [(c["reason"], c["field"], c["message"]) for c in answer["details"]["causes"]] == [
        ("FieldValueInvalid", "spec.count", "Invalid value: not 7"),
        ("FieldValueRequired", "spec.mode", "Required value: say how"),
        ("FieldValueForbidden", "spec", "Forbidden: no shares"),
    ]


def test_the_root_sees_its_name_and_a_failing_rule_says_what_failed(server) -> None:
    root = {"x-kubernetes-validations": rules("self.metadata.name.startsWith('t')", "self.spec.mode == 'x'")}
    server.create(DEFINITIONS, definition(SHARING, root=root))
    assert make(server, {"mode": "x"})[0] == 201
    _, answer = make(server, {}, name="other")
    assert [c["message"] for c in answer["details"]["causes"]] == [
        "Invalid value: failed rule: self.metadata.name.startsWith('t')",
        "Invalid value: \"object\": no such key: mode evaluating rule: self.spec.mode == 'x'",
    ]
    assert {c["field"] for c in answer["details"]["causes"]} == {"<nil>"}


def test_transition_rules_run_on_changes_only_and_follow_the_keys_of_lists(server) -> None:
    schema = copy.deepcopy(SHARING)
    schema["properties"]["mode"]["x-kubernetes-validations"] = rules("self == oldSelf")
    items = schema["properties"]["parts"]["items"]
    items["x-kubernetes-validations"] = rules({"rule": "self.n >= oldSelf.n", "message": "grows only"})
    server.create(DEFINITIONS, definition(schema))
    assert make(server, {"mode": "a", "parts": [{"id": "a", "n": 5}]})[0] == 201
    status, answer = change(server, {"spec": {"mode": "b"}})
    assert (status, answer["details"]["causes"][0]["message"]) == (
        422,
        'Invalid value: "b": failed rule: self == oldSelf',
    )
    assert change(server, {"spec": {"parts": [{"id": "b", "n": 1}, {"id": "a", "n": 6}]}})[0] == 200
    status, answer = change(server, {"spec": {"parts": [{"id": "a", "n": 5}, {"id": "b", "n": 1}]}})
    assert (status, answer["details"]["causes"][0]["field"]) == (422, "spec.parts[0]")


def test_optional_old_self_runs_on_creation_too(server) -> None:
    text = {
        "rule": "oldSelf.hasValue() || self.count == 1",
        "optionalOldSelf": True,
        "message": "starts at one",
    }
    server.create(DEFINITIONS, definition({**SHARING, "x-kubernetes-validations": rules(text)}))
    assert make(server, {"count": 2})[0] == 422
    assert make(server, {"count": 1})[0] == 201
    assert change(server, {"spec": {"count": 2}})[0] == 200


def test_what_was_wrong_before_stays_and_warns_until_it_is_changed(server) -> None:
    server.create(DEFINITIONS, definition(SHARING))
    assert make(server, {"mode": "long", "count": 9, "names": ["B"]})[0] == 201
    stricter = copy.deepcopy(SHARING)
    stricter["properties"]["mode"]["maxLength"] = 2
    stricter["properties"]["names"]["x-kubernetes-validations"] = rules(
        "self.all(name, name == name.lowerAscii())"
    )
    current = server.request("GET", f"{DEFINITIONS}/things.example.com")[1]
    current["spec"] = definition(stricter)["spec"]
    assert server.request("PUT", f"{DEFINITIONS}/things.example.com", current)[0] == 200
    assert change(server, {"spec": {"count": 10}})[0] == 200
    assert change(server, {"spec": {"mode": "other"}})[0] == 422
    assert change(server, {"spec": {"names": ["C"]}})[0] == 422
    assert change(server, {"spec": {"mode": "ok", "names": ["c"]}})[0] == 200


def test_defaults_go_inside_defaults_and_unknown_fields_go(server) -> None:
    schema = {
        "type": "object",
        "properties": {
            "mig": {
                "type": "object",
                "default": {},
                "properties": {"mode": {"type": "string", "default": "dynamic"}},
            },
            "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        },
    }
    server.create(DEFINITIONS, definition(schema))
    status, answer = make(server, {"free": {"a": {"b": None}}, "nothing": 1})
    assert (status, answer["spec"]) == (201, {"free": {"a": {"b": None}}, "mig": {"mode": "dynamic"}})
    strict = server.request("POST", f"{THINGS}?fieldValidation=Strict", thing({"nothing": 1}, name="b"))
    assert strict[0] == 400
    assert 'unknown field "spec.nothing"' in strict[1]["message"]


def test_a_rule_that_costs_too_much_at_run_time_is_stopped(server) -> None:
    nested = "self.names.all(a, self.names.all(b, self.names.all(c, a != b || b != c || true)))"
    schema = copy.deepcopy(SHARING)
    schema["properties"]["names"] = {
        "type": "array",
        "maxItems": 90,
        "items": {"type": "string", "maxLength": 2},
    }
    server.create(DEFINITIONS, definition({**schema, "x-kubernetes-validations": rules(nested)}))
    status, answer = make(server, {"names": [f"{i}" for i in range(90)]})
    assert status == 422
    assert "actual cost limit exceeded" in answer["message"]
    assert make(server, {"names": ["a", "b"]}, name="small")[0] == 201


INTEGERS = {"type": "array", "items": {"type": "integer"}}
TEXTS = {"type": "array", "items": {"type": "string", "maxLength": 63}}


@pytest.mark.parametrize(
    ("rule", "properties", "factor"),
    [
        ("self.l.all(x, x.contains('gpu'))", {"l": {**TEXTS, "maxItems": 333333}}, ""),
        ("self.l.all(x, x.contains('gpu'))", {"l": {**TEXTS, "maxItems": 333334}}, "1.000002x"),
        ("self.l.all(x, self.l.exists(y, x == y))", {"l": {**INTEGERS, "maxItems": 1000}}, ""),
        ("self.l.all(x, self.l.exists(y, x == y))", {"l": {**INTEGERS, "maxItems": 2000}}, "2.4x"),
        ("self.l.exists(x, x == 1)", {"l": INTEGERS}, ""),
        ("self.l.all(x, x.contains('gpu'))", {"l": {"type": "array", "items": {"type": "string"}}}, "more than 100x"),
        ("self.m.all(k, self.m[k].matches('^a+$'))", {"m": {"type": "object", "additionalProperties": {"type": "string"}}}, "more than 100x"),
        ("self.e == 'abc'", {"e": {"type": "string", "enum": ["abc", "defgh"]}}, ""),
        ("sets.contains(self.l, self.l)", {"l": INTEGERS}, "more than 100x"),
    ],
)  # fmt: skip
def test_a_definition_whose_rules_could_cost_too_much_is_refused(
    server, rule: str, properties: Json, factor: str
) -> None:
    schema = {"type": "object", "properties": properties, "x-kubernetes-validations": rules(rule)}
    status, answer = server.request("POST", f"{DEFINITIONS}?dryRun=All", definition(schema))
    if not factor:
        assert status == 201, answer
        return
    assert status == 422
    first = answer["details"]["causes"][0]
    assert first["field"].endswith("properties[spec].x-kubernetes-validations[0].rule")
    assert first["message"].startswith(
        f"Forbidden: estimated rule cost exceeds budget by factor of {factor} ("
    )


ARRAY = {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "string"}}}}


@pytest.mark.parametrize(
    ("schema", "field", "why"),
    [
        ({"type": "object", "x-kubernetes-validations": rules("self.nothing == 1")}, "x-kubernetes-validations[0].rule", "undefined field 'nothing'"),
        ({"type": "object", "x-kubernetes-validations": rules("'text'")}, "x-kubernetes-validations[0].rule", "must evaluate to a bool"),
        ({"type": "object", "x-kubernetes-validations": rules("")}, "x-kubernetes-validations[0].rule", "rule is not specified"),
        ({"type": "object", "x-kubernetes-validations": rules("true ||\n false")}, "x-kubernetes-validations[0].message", "line breaks"),
        ({"type": "array"}, "items", "must be specified"),
        ({"type": "thing"}, "type", "supported values"),
        ({**ARRAY, "x-kubernetes-list-type": "map"}, "x-kubernetes-list-map-keys", "must not be empty"),
        ({**ARRAY, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["id"]}, "items.properties[id].default", "must have a default"),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "string"}}, "additionalProperties", "mutual exclusive"),
        ({"type": "string", "pattern": "("}, "pattern", "must be a valid regular expression"),
        ({"type": "integer", "default": "x"}, "default", "must be of type integer"),
        ({"type": "object", "properties": {}, "default": {"a": 1}}, "default", "must not have unknown fields"),
        ({"type": "string", "anyOf": [{"type": "string"}]}, "anyOf[0].type", "must be empty to be structural"),
        ({**ARRAY, "x-kubernetes-list-type": "set"}, "items.x-kubernetes-map-type", "must be atomic"),
        ({"type": "object", "x-kubernetes-validations": [{"rule": "true", "fieldPath": ".no"}]}, "x-kubernetes-validations[0].fieldPath", "must be a valid path"),
        ({"type": "object", "$ref": "#/x"}, "$ref", "not supported"),
        ({"type": "array", "items": {"type": "string", "x-kubernetes-validations": rules("self == oldSelf")}}, "items.x-kubernetes-validations[0].rule", "oldSelf cannot be used"),
    ],
)  # fmt: skip
def test_a_schema_that_is_not_structural_is_refused_with_its_place(
    server, schema: Json, field: str, why: str
) -> None:
    status, answer = server.request("POST", DEFINITIONS, definition(schema))
    assert status == 422
    causes = [
        (c["field"].rpartition("properties[spec].")[2], c["message"]) for c in answer["details"]["causes"]
    ]
    assert any(found == field and why in message for found, message in causes), causes


def test_a_misspelt_word_of_a_schema_is_an_unknown_field(server) -> None:
    body = definition({"type": "object", "propertys": {}})
    status, answer = server.request("POST", f"{DEFINITIONS}?fieldValidation=Strict", body)
    assert status == 400
    assert (
        'unknown field "spec.versions[0].schema.openAPIV3Schema.properties.spec.propertys"'
        in answer["message"]
    )


def test_group_scope_and_kind_never_change(server) -> None:
    server.create(DEFINITIONS, definition(SHARING))
    current = server.request("GET", f"{DEFINITIONS}/things.example.com")[1]
    current["spec"]["scope"] = "Namespaced"
    current["spec"]["names"]["kind"] = "Other"
    status, answer = server.request("PUT", f"{DEFINITIONS}/things.example.com", current)
    assert status == 422
    assert [c["field"] for c in answer["details"]["causes"]] == ["spec.scope", "spec.names.kind"]


def test_a_status_subresource_keeps_spec_and_generation_apart(server) -> None:
    root = {
        "properties": {
            "spec": SHARING,
            "status": {"type": "object", "properties": {"phase": {"type": "string"}}},
        }
    }
    server.create(DEFINITIONS, definition(SHARING, root=root, subresources={"status": {}}))
    made = server.request("POST", THINGS, {**thing({"count": 1}), "status": {"phase": "x"}})[1]
    assert "status" not in made
    _, changed = server.request(
        "PATCH", f"{THINGS}/t/status", {"status": {"phase": "y"}, "spec": {"count": 2}}, content_type=MERGE
    )
    assert (changed["status"], changed["spec"], changed["metadata"]["generation"]) == (
        {"phase": "y"},
        {"count": 1},
        1,
    )
    _, changed = change(server, {"spec": {"count": 2}, "status": {"phase": "z"}})
    assert (changed["status"], changed["spec"], changed["metadata"]["generation"]) == (
        {"phase": "y"},
        {"count": 2},
        2,
    )


def test_a_bound_that_no_double_holds_exactly_makes_every_value_wrong(server):
    number = {"type": "integer", "format": "int64", "maximum": 2**63 - 1}
    body = definition({"type": "object", "properties": {"number": number}})
    server.create(DEFINITIONS, body)
    status, answer = make(server, {"number": 1})
    assert status == 422
    assert (
        "Maximum boundary value must be of type integer with format int64 in spec.number" in answer["message"]
    )


VALUES = {
    "type": "object",
    "properties": {
        "whole": {"type": "integer", "minimum": 1, "multipleOf": 3},
        "any": {"type": "string", "anyOf": [{"pattern": "^a"}, {"pattern": "^b"}]},
        "one": {"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "b$"}]},
        "not": {"type": "string", "not": {"pattern": "x"}},
        "time": {"type": "string", "format": "date-time"},
        "span": {"type": "string", "format": "duration"},
        "net": {"type": "string", "format": "cidr"},
        "small": {"type": "integer", "format": "int32"},
        "either": {"x-kubernetes-int-or-string": True},
        "pod": {
            "type": "object",
            "x-kubernetes-embedded-resource": True,
            "x-kubernetes-preserve-unknown-fields": True,
        },
        "object": {"type": "object", "properties": {"x": {"type": "integer", "default": 5}}},
    },
}


@pytest.mark.parametrize(
    ("value", "causes"),
    [
        ({"whole": 3.0, "any": "b", "one": "a", "span": "5 minutes", "net": "10.0.0.0/8", "either": "5%", "object": None}, []),
        ({"whole": 4}, [("spec.whole", "Invalid value: 4: spec.whole in body should be a multiple of 3")]),
        ({"any": "c"}, [("spec.any", "Invalid value: \"c\": spec.any in body should match '^a'"), ("<nil>", 'Invalid value: "": "spec.any" must validate at least one schema (anyOf)')]),
        ({"one": "ab"}, [("<nil>", 'Invalid value: "": "spec.one" must validate one and only one schema (oneOf). Found 2 valid alternatives')]),
        ({"not": "x"}, [("<nil>", 'Invalid value: "": "spec.not" must not validate the schema (not)')]),
        ({"time": "2020"}, [("spec.time", 'Invalid value: "2020": spec.time in body must be of type date-time: "2020"')]),
        ({"span": "soon"}, [("spec.span", 'Invalid value: "soon": spec.span in body must be of type duration: "soon"')]),
        ({"net": "10.0.0.1"}, [("spec.net", 'Invalid value: "10.0.0.1": spec.net in body must be of type cidr: "10.0.0.1"')]),
        ({"small": 1 << 40}, [("<nil>", 'Invalid value: "": Checked value must be of type integer with format int32 in spec.small')]),
        ({"either": 1.5}, [("spec.either", 'Invalid value: "number": spec.either in body must be of type integer,string: "number"')]),
        ({"pod": {"a": 1}}, [("spec.pod.apiVersion", "Required value"), ("spec.pod.kind", "Required value")]),
    ],
)  # fmt: skip
def test_values_are_checked_by_their_schema(server, value: Json, causes: list[tuple[str, str]]) -> None:
    server.create(DEFINITIONS, definition(VALUES))
    status, answer = make(server, value)
    if not causes:
        assert status == 201, answer
        return
    found = [(cause["field"], cause["message"]) for cause in answer["details"]["causes"]]
    assert (status, sorted(found)) == (422, sorted(causes))


NUMBERS = {
    "type": "object",
    "properties": {
        "read": {"type": "integer"},
        "plain": {"type": "integer"},
        "own": {"type": "integer", "x-kubernetes-validations": rules("self > 0")},
        "list": {"type": "array", "maxItems": 5, "items": {"type": "integer"}},
        "share": {"type": "number"},
    },
    "x-kubernetes-validations": rules("!has(self.read) || self.read >= 0", "!has(self.list) || self.list.all(n, n > 0)"),
}  # fmt: skip
DOUBLE = "invalid data, expected int, got float64 evaluating rule: "


@pytest.mark.parametrize(
    ("value", "field", "message"),
    [
        ({"read": 2.0}, "spec", f'"object": {DOUBLE}!has(self.read) || self.read >= 0'),
        ({"own": 2.0}, "spec.own", f'"integer": {DOUBLE}self > 0'),
        ({"list": [1, 2.0]}, "spec", f'"object": {DOUBLE}!has(self.list) || self.list.all(n, n > 0)'),
        ({"list": [0, 2.0]}, "spec", "failed rule: !has(self.list) || self.list.all(n, n > 0)"),
        ({"plain": 9007199254740994.0}, "spec.plain", '"number": spec.plain in body must be of type integer: "number"'),
    ],
)  # fmt: skip
def test_a_double_where_a_whole_number_belongs_is_refused_by_the_rule_that_reads_it(
    server, value: Json, field: str, message: str
) -> None:
    server.create(DEFINITIONS, definition(NUMBERS))
    status, answer = make(server, value)
    assert status == 422
    first = answer["details"]["causes"][0]
    assert (first["field"], first["message"]) == (field, f"Invalid value: {message}")


def test_a_double_that_no_rule_reads_is_stored_as_the_whole_number_it_is(server) -> None:
    server.create(DEFINITIONS, definition(NUMBERS))
    status, answer = make(server, {"plain": 2.0, "share": 3.0})
    assert (status, str(answer["spec"])) == (201, "{'plain': 2, 'share': 3}")
    _, changed = change(server, {"spec": {"plain": 4.0}})
    assert str(changed["spec"]["plain"]) == "4"
