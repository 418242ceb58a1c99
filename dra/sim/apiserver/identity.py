"""Who makes a request: the administrator, whom he impersonates, or the driver of a node with a token of its own.

Nobody is refused anything here for who he is; what webhooks and admission policies see of him is as on a real server.
Source: k8s.io/apiserver/pkg/endpoints/filters (impersonation), the service account token authenticator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

AUTHENTICATED = "system:authenticated"
MASTERS = "system:masters"
NODE_NAME = "authentication.kubernetes.io/node-name"
# As the chart names them when it is installed as its own page says.
PLUGIN = "system:serviceaccount:dra-driver-nvidia-gpu:dra-driver-nvidia-gpu-service-account-kubeletplugin"
_ACCOUNT = "system:serviceaccount:"
_EXTRA = "impersonate-extra-"


@dataclass(frozen=True, slots=True)
class User:
    """A user as admission sees him."""

    name: str
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Give the UserInfo of reviews."""
        info: dict[str, Any] = {"username": self.name, "groups": list(self.groups)}
        if self.extra:
            info["extra"] = {name: list(values) for name, values in self.extra.items()}
        return info


ADMIN = User("system:admin", (MASTERS, AUTHENTICATED))


def account(name: str, **extra: tuple[str, ...]) -> User:
    """Give a service account, whose groups follow from its name."""
    namespace = name.removeprefix(_ACCOUNT).partition(":")[0]
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}", AUTHENTICATED)
    return User(name, groups, extra)


def plugin_of(node: str) -> User:
    """Give the driver of a node: its service account, with a token that is bound to a pod there."""
    return account(PLUGIN, **{NODE_NAME: (node,)})


def acting(user: User, headers: Mapping[str, str]) -> User:
    """Give whom a user impersonates (`kubectl --as`), himself if nobody; values of one header are apart by lines."""
    name = headers.get("impersonate-user", "")
    if not name:
        return user
    extra = {
        unquote(key.removeprefix(_EXTRA)): tuple(value.split("\n"))
        for key, value in headers.items()
        if key.startswith(_EXTRA)
    }
    groups = tuple(headers["impersonate-group"].split("\n")) if "impersonate-group" in headers else ()
    if not groups and name.startswith(_ACCOUNT):
        return User(name, account(name).groups, extra)
    return User(name, (*groups, *(() if AUTHENTICATED in groups else (AUTHENTICATED,))), extra)
