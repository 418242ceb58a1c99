"""Which API calls bring a pool from what is stored to what is wanted, in which order. Pure.

The rule behind the generation: at every moment the slices with the highest generation are either exactly the
wanted pool, or fewer (or more) than their `resourceSliceCount` says, so that the scheduler leaves the pool
alone. Source: resource.k8s.io/v1 ResourcePool; kube-scheduler 1.36 takes only complete pools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dra.controller.shape import (
    PoolIdentity,
    TaintTimes,
    content_in,
    index_of,
    normal_form,
    slice_body,
    slice_name,
    slice_spec,
    with_taint_times,
    without_taints,
)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Memory:
    """What earlier passes learnt.

    Args:
        generation: the highest generation that this process published, 0 before the first.
        contents: the normal forms that were published with it.
        accepted: by index, a wanted normal form and the one the server made of it.
        times: when taints were added.
        salt: non-empty if the usual object names belong to somebody else.
    """

    generation: int = 0
    contents: tuple[Json, ...] = ()
    accepted: Mapping[int, tuple[Json, Json]] = field(default_factory=dict)
    times: TaintTimes = field(default_factory=dict)
    salt: str = ""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The calls, in the order of the fields: what is too much goes first, what is missing comes last."""

    generation: int
    delete: tuple[Json, ...] = ()
    update: tuple[tuple[int, Json], ...] = ()
    create: tuple[tuple[int, Json], ...] = ()
    kept: tuple[Json, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether the stored pool is the wanted one."""
        return not (self.delete or self.update or self.create)

    @property
    def only_creates(self) -> bool:
        """Whether slices are missing and nothing else is wrong (a wipe, or the first publication)."""
        return bool(self.create) and not self.delete and not self.update


def plan_pool(
    contents: Sequence[Json],
    stored: Sequence[Json],
    *,
    identity: PoolIdentity,
    memory: Memory,
    forms: Sequence[Json],
) -> PoolPlan:
    """Compare the wanted contents with all stored slices of this driver and node.

    * nothing differs: nothing is done;
    * exactly one slice differs, or slices are missing and the others are right: the generation stays;
    * several slices differ, in nothing but taints: the generation stays too, for each state in between is a pool
      that the node could have, and with a new one nothing could be allocated until the last slice is written;
    * anything else: the highest generation seen plus one, in all slices.

    `forms` are the normal forms of the contents.
    """
    usable, surplus = _sorted_out(stored, count=len(contents), identity=identity, memory=memory)
    ours = [obj for obj in stored if _pool(obj).get("name") == identity.pool_name]
    highest = max([_generation(obj) for obj in ours], default=None)
    top = max(memory.generation, highest if highest is not None else 0)
    if not usable:
        # All are gone, or there never were any. The same content may come back as it was.
        fresh = highest is None and list(memory.contents) == list(forms)
        generation = max(top, 1) if fresh or top == 0 else top + 1
        return PoolPlan(
            generation,
            delete=tuple(surplus),
            create=_creations(range(len(contents)), contents, identity, generation=generation, memory=memory),
        )

    def is_right(index: int, obj: Json) -> bool:
        if not _current(obj, top, count=len(contents), identity=identity):
            return False
        # Most servers store what was sent, and comparing is less work than understanding.
        return content_in(obj.get("spec") or {}) == contents[index] or _says(obj, index, forms[index], memory)

    changed = [index for index, obj in usable.items() if not is_right(index, obj)]
    missing = [index for index in range(len(contents)) if index not in usable]
    in_the_way = any(
        _pool(obj).get("name") == identity.pool_name and _generation(obj) == top for obj in surplus
    )
    only_taints = not missing and all(
        _current(usable[index], top, count=len(contents), identity=identity)
        and without_taints(normal_form(usable[index].get("spec") or {})) == without_taints(forms[index])
        for index in changed
    )
    bump = in_the_way or (len(changed) > 1 and not only_taints) or bool(changed and missing)
    generation = top + 1 if bump else top
    writes = sorted(usable) if bump else changed
    return PoolPlan(
        generation,
        delete=tuple(surplus),
        update=tuple(
            (index, _updated(usable[index], contents[index], identity, generation, len(contents), memory))
            for index in writes
        ),
        create=_creations(missing, contents, identity, generation=generation, memory=memory),
        kept=tuple(usable[index] for index in sorted(usable) if index not in writes),
    )


def _sorted_out(
    stored: Sequence[Json], *, count: int, identity: PoolIdentity, memory: Memory
) -> tuple[dict[int, Json], list[Json]]:
    """Split what is stored into the slice for each position, and what has to go.

    A slice of this pool that another driver's release left is taken over by the index in its name, so that
    a change of driver does not make the devices disappear for a moment.
    """
    usable: dict[int, Json] = {}
    surplus: list[Json] = []

    def own_name_first(obj: Json) -> tuple[bool, str]:
        name = obj["metadata"]["name"]
        index = index_of(name)
        return index is None or name != slice_name(identity, index, salt=memory.salt), name

    for obj in sorted(stored, key=own_name_first):
        index = index_of(obj["metadata"]["name"])
        fits = index is not None and index < count and index not in usable
        if (
            index is not None
            and fits
            and _pool(obj).get("name") == identity.pool_name
            and not _of_old_node(obj, identity)
        ):
            usable[index] = obj
        else:
            surplus.append(obj)
    return usable, surplus


def _current(obj: Json, top: int, *, count: int, identity: PoolIdentity) -> bool:
    """Whether a stored slice counts as part of the pool as it is now, whatever it holds."""
    return (
        _generation(obj) == top and _pool(obj).get("resourceSliceCount") == count and _is_owned(obj, identity)
    )


def _says(obj: Json, index: int, wanted: Json, memory: Memory) -> bool:
    """Whether a stored slice says what is wanted, or what this server makes of it."""
    form = normal_form(obj.get("spec") or {})
    if form == wanted:
        return True
    accepted = memory.accepted.get(index)
    return accepted is not None and accepted[0] == wanted and accepted[1] == form


def _creations(
    indexes: Sequence[int] | range,
    contents: Sequence[Json],
    identity: PoolIdentity,
    *,
    generation: int,
    memory: Memory,
) -> tuple[tuple[int, Json], ...]:
    creations = []
    for index in indexes:
        content = with_taint_times(contents[index], memory.times)
        spec = slice_spec(identity, content, generation=generation, count=len(contents))
        creations.append((index, slice_body(identity, slice_name(identity, index, salt=memory.salt), spec)))
    return tuple(creations)


def _updated(
    obj: Json, content: Json, identity: PoolIdentity, generation: int, count: int, memory: Memory
) -> Json:
    """Give the stored object with our spec; its resourceVersion makes a change in between a conflict."""
    spec = slice_spec(identity, with_taint_times(content, memory.times), generation=generation, count=count)
    return {**obj, "metadata": {**obj["metadata"], "ownerReferences": [identity.owner]}, "spec": spec}


def _pool(obj: Json) -> Mapping[str, Any]:
    return (obj.get("spec") or {}).get("pool") or {}


def _generation(obj: Json) -> int:
    return int(_pool(obj).get("generation") or 0)


def _node_owners(obj: Json) -> list[str]:
    references = (obj.get("metadata") or {}).get("ownerReferences") or []
    return [str(entry.get("uid")) for entry in references if entry.get("kind") == "Node"]


def _is_owned(obj: Json, identity: PoolIdentity) -> bool:
    return _node_owners(obj) == [identity.node_uid]


def _of_old_node(obj: Json, identity: PoolIdentity) -> bool:
    """Whether the slice belongs to a node of this name that is no more; the collector is about to take it."""
    owners = _node_owners(obj)
    return bool(owners) and identity.node_uid not in owners
