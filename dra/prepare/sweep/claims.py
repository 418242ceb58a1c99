"""The claims of the API server as a sweep asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dra.api.claim import ClaimRef, ClaimView, parse_claim
from dra.errors import DraError, KubeError
from dra.prepare.model import ClaimSource, says_gone

_API_SECONDS = 5.0


class Claims:
    """Reads claims. Each call raises KubeError where the API gives no answer."""

    def __init__(self, source: ClaimSource, *, driver: str) -> None:
        self._source = source
        self._driver = driver

    def read(self, ref: ClaimRef) -> ClaimView | None:
        """Read a claim by its name; None if there is none."""
        try:
            claim = self._source.get(ref.namespace, ref.name, _API_SECONDS)
        except KubeError as error:
            if says_gone(error):
                return None
            raise
        return self.parse(claim)

    def all(self) -> Iterable[Mapping[str, Any]]:
        """List the claims of the cluster."""
        return self._source.list(_API_SECONDS)

    def parse(self, claim: Mapping[str, Any]) -> ClaimView:
        """Give what a claim says to this driver."""
        return parse_claim(claim, driver=self._driver)


class ClaimsByUid:
    """All claims by UID, listed once, when the first is asked for."""

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        self._found: dict[str, Mapping[str, Any]] | None = None

    def get(self, uid: str) -> Mapping[str, Any] | None:
        """Give a claim. Raises KubeError."""
        if self._found is None:
            self._found = {uid_of(claim): claim for claim in self._claims.all()}
        return self._found.get(uid)


def uid_of(claim: Mapping[str, Any]) -> str:
    """Give the UID of a claim."""
    return str((claim.get("metadata") or {}).get("uid"))


def is_no_answer(error: DraError) -> bool:
    """Whether the API server said nothing about claims at all: each further question would end the same way."""
    return isinstance(error, KubeError) and (error.status == 0 or error.code == "DRA-API-NOT-SERVED")
