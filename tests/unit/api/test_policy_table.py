"""The models and the simulated API server say the same of each policy of the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from dra.api.policy import decode_policy
from dra.errors import ConfigError
from dra.sim.apiserver import SimApiServer
from tests.policy_table import ACCEPTED, REFUSED
from tests.yaml_text import read

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
POLICIES = "/apis/gpudra.dev/v1alpha1/gpunodepolicies"


def body(spec):
    return {
        "apiVersion": "gpudra.dev/v1alpha1",
        "kind": "GpuNodePolicy",
        "metadata": {"name": "p"},
        "spec": spec,
    }


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_models_accept(name):
    assert decode_policy(body(ACCEPTED[name])).layers


@pytest.mark.parametrize("name", REFUSED)
def test_the_models_refuse(name):
    spec, word = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        decode_policy(body(spec))
    assert caught.value.code == "DRA-POLICY-INVALID"
    assert word in str(caught.value)


@pytest.fixture(scope="module")
def server():
    server = SimApiServer()
    for path in sorted((Path(__file__).parents[3] / "crds").glob("*.yaml")):
        status, answer = server.request("POST", DEFINITIONS, read(path.read_text()))
        assert status == 201, answer
    return server


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_simulated_api_server_accepts(server, name):
    status, answer = server.request("POST", f"{POLICIES}?dryRun=All", body(ACCEPTED[name]))
    assert status == 201, answer


@pytest.mark.parametrize("name", REFUSED)
def test_the_simulated_api_server_refuses(server, name):
    spec, word = REFUSED[name]
    status, answer = server.request("POST", f"{POLICIES}?dryRun=All", body(spec))
    assert status == 422, answer
    assert word in answer["message"]
