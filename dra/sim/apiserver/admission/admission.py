"""One request's way through the webhooks and the validating policies.

Not simulated: webhooks on subresources other than `status`, conversion webhooks, and that mutating webhooks see what
built-in admission added. Source: k8s.io/apiserver/pkg/admission/plugin/webhook/{mutating,validating}.
"""

from __future__ import annotations

import copy
import json
import uuid
from base64 import b64decode
from typing import Any

from dra.api.rules.decode import DecodeError, Findings, decode
from dra.sim.apiserver.admission.caller import WebhookUnreachable, ask
from dra.sim.apiserver.admission.hooks import (
    ConditionError,
    Hook,
    as_seen,
    conditions_met,
    hooks_for,
    selectors_fit,
)
from dra.sim.apiserver.admission.policies import check, failure_of, policies_for
from dra.sim.apiserver.call import Call
from dra.sim.apiserver.convert import to_storage
from dra.sim.apiserver.custom import shape
from dra.sim.apiserver.patch import json_patch
from dra.sim.apiserver.state import ServerState
from dra.sim.apiserver.status import ApiFailure, bad_request, internal_error

Json = dict[str, Any]
_OPTIONS = {"CREATE": "CreateOptions", "UPDATE": "UpdateOptions", "DELETE": "DeleteOptions"}


class Admission:
    """The webhooks and policies of one request; false if there are none. Must not be used under the storage lock: webhooks may call
    the server themselves.
    """

    def __init__(self, api: ServerState, call: Call, operation: str, *, dry: bool) -> None:
        self._api, self._call, self._operation, self._dry = api, call, operation, dry
        self._mutating = hooks_for(api, call, operation, mutating=True)
        self._validating = hooks_for(api, call, operation, mutating=False)
        self._policies = policies_for(api, call, operation)

    def __bool__(self) -> bool:
        """Whether there is a webhook or a policy to ask."""
        return bool(self._mutating or self._validating or self._policies)

    def mutated(self, new: Json, old: Json | None = None) -> Json:
        """Give the object (as stored) as the mutating webhooks leave it.

        Raises:
            ApiFailure: one denies, or cannot be asked.
        """
        # What each webhook that wants to be asked again saw last.
        seen: dict[int, str] = {}
        for again in (False, True):
            for index, hook in enumerate(self._mutating):
                state = json.dumps(new, sort_keys=True)
                if again and (index not in seen or seen[index] == state):
                    continue
                changed = self._mutate(hook, new, old)
                if changed is not None:
                    new = changed
                if hook.config.get("reinvocationPolicy") == "IfNeeded":
                    seen[index] = json.dumps(new, sort_keys=True)
        return new

    def _mutate(self, hook: Hook, new: Json, old: Json | None) -> Json | None:
        response = self._ask(hook, new, old)
        patch = (response or {}).get("patch")
        if not response or not patch:
            return None
        if response.get("patchType") != "JSONPatch":
            given = response.get("patchType")
            why = f"received invalid webhook response: webhook returned response.patchType of {given}"
            self._failed(hook, why)
            return None
        shown = as_seen(self._call, hook.version, new)
        try:
            patched = json_patch(shown, json.loads(b64decode(patch, validate=True)))
            return self._stored(hook, patched)
        except (ApiFailure, ValueError, DecodeError, TypeError, AttributeError) as error:
            raise internal_error(f"failed to apply the patch of webhook {hook.name}: {error}") from error

    def _stored(self, hook: Hook, patched: Json) -> Json:
        resource, version = self._call.resource, hook.version
        ref = resource.versions[version]
        if ref:
            shaped = decode(patched, ref, Findings())
        else:
            shaped = shape(patched, resource.custom.schemas.get(version) or {}, Findings())
        return to_storage(resource, version, {**shaped, "kind": resource.kind})

    def validate(self, new: Json | None, old: Json | None = None) -> None:
        """Ask the policies and the validating webhooks (and, about a deletion, the mutating ones first) about an object
        as it will be stored.

        Raises:
            ApiFailure: one denies, or cannot be asked.
        """
        for hook in self._mutating if new is None else []:
            self._ask(hook, new, old)
        denied = []
        for policy in self._policies:
            request = self._request(policy.version, new, old)
            denied += check(self._api, self._call, policy, request, (new, old))
        if denied:
            raise failure_of(self._call, self._name(new, old), denied[0])
        for hook in self._validating:
            self._ask(hook, new, old)

    def _ask(self, hook: Hook, new: Json | None, old: Json | None) -> Json | None:
        """Ask one webhook; None if it is not concerned or its failure is ignored.

        Raises:
            ApiFailure: it denies, or cannot be asked.
        """
        if not selectors_fit(self._api, hook.config, self._call, (new, old)):
            return None
        request = self._request(hook.version, new, old)
        try:
            if not conditions_met(hook, request):
                return None
        except ConditionError as error:
            if hook.ignores_failures:
                return None
            raise self._forbidden(hook, str(error)) from error
        if self._dry and hook.config.get("sideEffects") not in {"None", "NoneOnDryRun"}:
            raise bad_request(f'admission webhook "{hook.name}" does not support dry run')
        review = {"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": request}
        try:
            response = ask(self._api.services, hook.config, review)
        except WebhookUnreachable as error:
            self._failed(hook, str(error))
            return None
        for warning in response.get("warnings") or []:
            self._call.warn(str(warning))
        if response.get("allowed") is not True:
            raise denied(hook.name, response.get("status") or {})
        return response

    def _failed(self, hook: Hook, why: str) -> None:
        if not hook.ignores_failures:
            raise internal_error(f'failed calling webhook "{hook.name}": {why}')

    def _forbidden(self, hook: Hook, why: str) -> ApiFailure:
        return ApiFailure(
            403, "Forbidden", f'failed evaluating match conditions of webhook "{hook.name}": {why}'
        )

    def _name(self, new: Json | None, old: Json | None) -> str:
        return self._call.name or str(((new or old or {}).get("metadata") or {}).get("name") or "")

    def _request(self, seen: str, new: Json | None, old: Json | None) -> Json:
        """Give the AdmissionRequest for who sees objects in version `seen`."""
        call = self._call
        resource = call.resource

        def kind(version: str) -> Json:
            return {"group": resource.group, "version": version, "kind": resource.kind}

        def of(version: str) -> Json:
            return {"group": resource.group, "version": version, "resource": resource.plural}

        name = self._name(new, old)
        request: Json = {
            "uid": str(uuid.uuid4()),
            "kind": kind(seen),
            "resource": of(seen),
            "requestKind": kind(call.version),
            "requestResource": of(call.version),
            "operation": self._operation,
            "userInfo": call.user.to_json(),
            "object": copy.deepcopy(as_seen(call, seen, new)),
            "oldObject": copy.deepcopy(as_seen(call, seen, old)),
            "dryRun": self._dry,
            "options": self._options(),
        }
        if call.subresource:
            request |= {"subResource": call.subresource, "requestSubResource": call.subresource}
        if name:
            request["name"] = name
        if resource.namespaced:
            request["namespace"] = call.namespace
        return request

    def _options(self) -> Json:
        call = self._call
        kind = "PatchOptions" if call.request.method == "PATCH" else _OPTIONS[self._operation]
        options: Json = {"kind": kind, "apiVersion": "meta.k8s.io/v1"}
        for key in ("fieldManager", "fieldValidation"):
            if call.query.get(key):
                options[key] = call.query[key]
        if self._dry:
            options["dryRun"] = ["All"]
        return options


def denied(name: str, result: Json) -> ApiFailure:
    """Give the failure of a request that a webhook denied. Source: webhook/errors.ToStatusErr."""
    code = result.get("code")
    reason, message = result.get("reason") or "", result.get("message") or ""
    text = f'admission webhook "{name}" denied the request'
    text += f": {message or reason}" if message or reason else " without explanation"
    return ApiFailure(
        code if isinstance(code, int) and code >= 400 else 400, reason, text, details=result.get("details")
    )
