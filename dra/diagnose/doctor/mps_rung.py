"""The MPS keeper of a node: whether it answers, whether each claim that needs a daemon has it, and whom its end would end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dra.diagnose.doctor.context import NodeContext
from dra.diagnose.doctor.model import Finding, Looked, error, error_of, note, warning
from dra.diagnose.doctor.published_rungs import records_on_disk
from dra.errors import DraError
from dra.host.boot import boot_id
from dra.prepare.record import Record
from dra.prepare.sharing.keeper_client import ABSENT, KeeperClient
from dra.prepare.sharing.mps import KIND, DaemonStatus

_PODS_SHOWN = 12


def look_at_mps(ctx: NodeContext) -> Looked:
    """Look at the keeper and its daemons; asks it, changes nothing."""
    users = _users(ctx)
    try:
        daemons = KeeperClient(ctx.paths.state_dir(ctx.driver)).list()
    except DraError as problem:
        return _no_answer(problem, users)
    findings = list(_findings(daemons, users))
    return Looked(f"the keeper runs, with {len(daemons)} control daemon(s)", tuple(findings))


def _no_answer(problem: DraError, users: Mapping[str, Sequence[Record]]) -> Looked:
    if users:
        names = ", ".join(sorted({str(record.ref) for records in users.values() for record in records}))
        found = error_of(problem)
        return Looked(
            "", (error(found.code, f"{found.message} (claims with MPS here: {names})", found.remedy),)
        )
    if problem.code == ABSENT:
        return Looked("no keeper runs and no claim uses MPS; pods that ask for it would wait")
    return Looked("", (warning(problem.code, problem.message, problem.remedy),))


def _findings(daemons: Sequence[DaemonStatus], users: Mapping[str, Sequence[Record]]) -> Iterator[Finding]:
    known = {each.spec.id: each for each in daemons}
    for daemon_id, records in sorted(users.items()):
        claims = ", ".join(str(record.ref) for record in records)
        status = known.get(daemon_id)
        if status is None:
            yield warning(
                "DRA-MPS-DAEMON-UNKNOWN",
                f"the keeper does not know the control daemon {daemon_id} of claim {claims}",
                "The plugin has it started again within minutes; else restart the plugin's pod.",
            )
        elif not status.ready:
            yield warning(
                "DRA-MPS-DAEMON-DOWN",
                f"the control daemon {daemon_id} of claim {claims} does not run",
                "The keeper tries on; the log of its pod says what is in the way.",
            )
        elif status.restarts:
            yield note(
                "DRA-MPS-DAEMON-RESTARTED",
                f"the control daemon of claim {claims} was restarted {status.restarts} time(s)",
                "Containers of that claim that report CUDA errors must be restarted.",
            )
    for daemon_id in sorted(known.keys() - users.keys()):
        yield note(
            "DRA-MPS-DAEMON-OF-NOBODY", f"no claim has the control daemon {daemon_id}", "The plugin ends it."
        )
    pods = _pods(users)
    if pods:
        shown = ", ".join(pods[:_PODS_SHOWN]) + (", …" if len(pods) > _PODS_SHOWN else "")
        yield note(
            "DRA-MPS-KEEPER-HOLDS",
            f"replacing the keeper's pod ends the CUDA work of {len(pods)} pod(s): {shown}",
            "Delete the keeper's pod (OnDelete) when that may happen, for example while the node is drained.",
        )


def _users(ctx: NodeContext) -> dict[str, list[Record]]:
    """Give the claims of this boot that have a daemon, by its id."""
    now = boot_id(ctx.paths)
    found: dict[str, list[Record]] = {}
    for each in records_on_disk(ctx):
        if each.record is None or not each.record.holds(now):
            continue
        for entry in each.record.journal:
            if entry.kind == KIND:
                found.setdefault(str(entry.args.get("id", "")), []).append(each.record)
    return found


def _pods(users: Mapping[str, Sequence[Record]]) -> list[str]:
    return sorted(
        {
            f"{record.ref.namespace}/{consumer.name}"
            for records in users.values()
            for record in records
            for consumer in record.consumers
            if consumer.resource == "pods"
        }
    )
