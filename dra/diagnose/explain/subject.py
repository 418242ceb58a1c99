"""What the user asks about: `pod/NAME`, `claim/NAME` or `NAME`."""

from __future__ import annotations

from dra.diagnose.explain.cluster import CLAIM, POD, Cluster, Json
from dra.errors import ConfigError

_WORDS = {
    "pod": POD, "pods": POD, "po": POD,
    "claim": CLAIM, "claims": CLAIM, "resourceclaim": CLAIM, "resourceclaims": CLAIM,
    "resourceclaims.resource.k8s.io": CLAIM, "resourceclaim.resource.k8s.io": CLAIM,
}  # fmt: skip


def find_subject(text: str, namespace: str | None, cluster: Cluster) -> tuple[str, Json]:
    """Give (kind, object). Without a namespace any will do where only one has the name (`default` first).

    Raises:
        ConfigError: DRA-EXPLAIN-SUBJECT, DRA-EXPLAIN-NOT-FOUND, DRA-EXPLAIN-AMBIGUOUS.
    """
    kinds, name = parse_subject(text)
    for kind in kinds:
        found = [item for item in cluster.all(kind) if item["metadata"]["name"] == name]
        if namespace is not None:
            found = [item for item in found if item["metadata"]["namespace"] == namespace]
        preferred = [item for item in found if item["metadata"]["namespace"] == "default"] or found
        if len(preferred) == 1:
            return kind, preferred[0]
        if preferred:
            places = ", ".join(sorted(item["metadata"]["namespace"] for item in preferred))
            raise ConfigError(
                "DRA-EXPLAIN-AMBIGUOUS",
                f"there are several {kind}s {name}, in the namespaces {places}",
                remedy="Choose one with -n.",
            )
    raise _not_found(kinds, name, namespace, cluster)


def parse_subject(text: str) -> tuple[tuple[str, ...], str]:
    """Give the kinds to look for, in order, and the name.

    Raises:
        ConfigError: DRA-EXPLAIN-SUBJECT.
    """
    word, slash, name = text.partition("/")
    if not slash:
        return (POD, CLAIM), word
    kind = _WORDS.get(word.lower())
    if kind is None or not name or "/" in name:
        raise ConfigError(
            "DRA-EXPLAIN-SUBJECT",
            f"{text!r} names neither a pod nor a claim",
            remedy="Write pod/NAME, claim/NAME or NAME, and the namespace with -n.",
        )
    return (kind,), name


def _not_found(kinds: tuple[str, ...], name: str, namespace: str | None, cluster: Cluster) -> ConfigError:
    what = " or ".join(kinds)
    place = f" in namespace {namespace}" if namespace else ""
    unread = [f"{kind}s {cluster.unread[kind]}" for kind in kinds if not cluster.knows(kind)]
    near = sorted({item["metadata"]["name"] for kind in kinds for item in cluster.all(kind)})
    import difflib

    guess = difflib.get_close_matches(name, near, n=1)
    remedy = f"Did you mean {guess[0]}?" if guess else "Check the name and the namespace (-n)."
    note = f" ({'; '.join(unread)})" if unread else ""
    return ConfigError("DRA-EXPLAIN-NOT-FOUND", f"there is no {what} {name}{place}{note}", remedy=remedy)
