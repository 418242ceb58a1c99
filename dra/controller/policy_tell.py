"""What is said of a node's policies: each thing once while it lasts, and again when it comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from dra.api.policy import Policy, Resolution, UnreadablePolicy, conflicts_in_words
from dra.controller.policy_model import GpuReport, NodeReport, Tell
from dra.telemetry.told import Told


class PolicyTeller:
    """Turns what the keeper finds into Events and reports; nothing is said twice.

    Args:
        tell, report: as in `PolicyPorts`.
    """

    def __init__(self, tell: Tell, report: Callable[[NodeReport], None]) -> None:
        self._say, self._write = tell, report
        # By the name of the policy; by winner, loser, block and who is told.
        self._unreadable: Told[str] = Told()
        self._conflicts: Told[tuple[str, str, str, str]] = Told()
        # What became of each GPU, by device name, as far as it was not as it should be.
        self._gpus: dict[str, GpuReport] = {}
        self._reported: NodeReport | None = None

    def forget(self) -> None:
        """Take that another instance speaks for the node now."""
        self._unreadable.only(())
        self._conflicts.only(())
        self._gpus, self._reported = {}, None

    def tell_unreadable(self, policies: Sequence[UnreadablePolicy], gpus: Iterable[GpuReport]) -> None:
        """Say that nothing is changed, because of these."""
        self._unreadable.only({each.name for each in policies})
        for each in policies:
            if self._unreadable.is_news(each.name, each.problem):
                self._say(each.name, "", "Warning", "PolicyInvalid", each.problem)
        problem = "; ".join(each.problem for each in policies)
        self._report(
            NodeReport(gpus=tuple(gpus), problem=f"nothing is changed while a policy is invalid: {problem}")
        )

    def tell_progress(
        self, found: Resolution, policies: Mapping[str, Policy], gpus: Iterable[GpuReport]
    ) -> None:
        """Say how far the GPUs are, and which policies are in each other's way."""
        self._unreadable.only(())
        reports = tuple(gpus)
        devices = {report.device for report in reports}
        self._gpus = {device: report for device, report in self._gpus.items() if device in devices}
        for report in reports:
            self._tell_gpu(report)
        clashes = conflicts_in_words(found.conflicts)
        self._conflicts.only({(*clash, name) for clash in clashes for name in clash[:2]})
        for clash, text in clashes.items():
            for name in clash[:2]:
                if self._conflicts.is_news((*clash, name), text):
                    self._say(name, "", "Warning", "PolicyConflict", text)
        self._report(
            NodeReport(
                policies=tuple((name, policies[name].generation) for name in found.policies),
                gpus=reports,
                conflicts=tuple(clashes.values()),
            )
        )

    def _tell_gpu(self, report: GpuReport) -> None:
        """Say what becomes of a GPU; a step of a moment is not worth an Event, nor is each claim that ends."""
        device, before = report.device, self._gpus.get(report.device)
        if report.state == "Applied":
            if before is not None:
                del self._gpus[device]
                said = f"{device} is as it should be"
                self._say(before.policy, device, "Normal", "PolicyApplied", said)
            return
        known = (
            before is not None
            and (before.state, before.policy, before.blocks) == (report.state, report.policy, report.blocks)
            and (
                set(report.claims) <= set(before.claims)
                if report.claims
                else before.message == report.message
            )
        )
        if not known and (report.state != "Waiting" or report.claims):
            kind: Literal["Normal", "Warning"] = "Normal" if report.state == "Waiting" else "Warning"
            self._say(report.policy, device, kind, f"Policy{report.state}", report.message)
            self._gpus[device] = report
        elif before is None:
            self._gpus[device] = report

    def _report(self, report: NodeReport) -> None:
        if report != self._reported:
            self._write(report)
            self._reported = report
