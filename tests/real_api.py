"""Calls to a real API server with the methods that tests use of the simulated one, so that one test can run against both."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Mapping
from contextlib import closing
from http.client import HTTPSConnection
from typing import Any

from tests.real_apiserver import ADMIN, RealApiServer

Json = dict[str, Any]
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"
SECONDS = 60.0


class RealApi:
    """`request` and `create` of `SimApiServer`, on a real server.

    A definition that is deleted and made again at once may still be served as it was: `example.com` is another group for
    each test, under the same name for the test.
    """

    def __init__(self, server: RealApiServer) -> None:
        self._port, self._token = server.port, server.token_of(ADMIN)
        self._context = ssl.create_default_context(cafile=str(server.ca_file))
        self._context.check_hostname = False
        self._test = 0

    @property
    def _group(self) -> str:
        return f"t{self._test}.example.com"

    def request(
        self,
        method: str,
        target: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Make a call; gives status and decoded answer."""
        sent = {
            "Authorization": f"Bearer {self._token}",
            "Content-Type": content_type,
            "Accept": "application/json",
            **(headers or {}),
        }
        with closing(
            HTTPSConnection("127.0.0.1", self._port, context=self._context, timeout=SECONDS)
        ) as connection:
            text = None if body is None else json.dumps(body).replace("example.com", self._group)
            connection.request(method, target.replace("example.com", self._group), text, sent)
            answer = connection.getresponse()
            content = answer.read().decode().replace(self._group, "example.com")
        return answer.status, json.loads(content) if content[:1] == "{" else content

    def create(self, collection: str, obj: Json) -> Json:
        """Create an object; a definition is served when this returns.

        Raises:
            RuntimeError: the server refused it.
        """
        status, answer = self.request("POST", collection, obj)
        if status != 201:
            raise RuntimeError(f"{collection}: {status} {answer}")
        if collection == DEFINITIONS:
            self._served(obj)
        return dict(answer)

    def _served(self, definition: Json) -> None:
        spec = definition["spec"]
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        self._until(lambda: self.request("GET", path)[0] == 200, f"{path} to be served")

    def clean(self) -> None:
        """Delete definitions, webhook configurations and what tests made in the default namespace."""
        for collection in (
            f"{ADMISSION}/mutatingwebhookconfigurations",
            f"{ADMISSION}/validatingwebhookconfigurations",
            f"{ADMISSION}/validatingadmissionpolicybindings",
            f"{ADMISSION}/validatingadmissionpolicies",
            "/api/v1/namespaces/default/configmaps",
            "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims",
            DEFINITIONS,
        ):
            self.request("DELETE", collection)
        self._test += 1

    def _until(self, condition: Any, what: str) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > end:
                raise AssertionError(f"waited {SECONDS:g} s for {what}")
            time.sleep(0.05)
