"""Faults of a running cluster: switched on by name, listed from what is really on, cleared.

A node's NVML and driver faults stand in the node's own state file, those of the API server in its memory. Nothing is
remembered here, so that the list is always true.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dra.errors import ConfigError
from dra.sim.apiserver.faults import Fault as ApiFault
from dra.sim.cluster import SimCluster
from dra.sim.cluster_node import ClusterNode
from dra.sim.nvml.control import DriverInUseError

Json = dict[str, Any]
API = "api"
Options = Mapping[str, Any]
# A process that no machine has: the highest pid of Linux.
_HOLDER = 4_194_304


@dataclass(frozen=True, slots=True)
class NodeFault:
    """A fault of a node: what it is called, what it does, and whether it needs to be told a GPU."""

    help: str
    act: Callable[[ClusterNode, Options], str]
    needs: tuple[str, ...] = ()


def _nvml(node: ClusterNode, options: Options) -> str:
    number = node.machine.control.set_fault(
        options.get("function") or "*",
        gpu=options.get("gpu"),
        error=options.get("error"),
        delay_seconds=float(options.get("seconds") or 0.0),
        hang=bool(options.get("hang")),
        times=options.get("times"),
    )
    return f"NVML fault {number} is on"


def _gpu_lost(node: ClusterNode, options: Options) -> str:
    gpu = options["gpu"]
    xid = options.get("xid")
    node.machine.control.lose_gpu(gpu, xid=79 if xid is None else int(xid))
    return f"GPU {gpu} has fallen off the bus"


def _gpu_removed(node: ClusterNode, options: Options) -> str:
    node.machine.control.remove_gpu(options["gpu"])
    return f"GPU {options['gpu']} is taken out of the machine"


def _xid(node: ClusterNode, options: Options) -> str:
    control, gpu, xid = node.machine.control, options["gpu"], int(options["xid"])
    times = int(options.get("times") or 1)
    mig = options.get("mig")
    if mig is None:
        control.push_xid(gpu, xid, times=times)
        return f"GPU {gpu} reported XID {xid}"
    gi, ci = control.mig_instances(gpu, str(mig))
    control.push_xid(gpu, xid, gi=gi, ci=ci, times=times)
    return f"MIG device {mig} of GPU {gpu} reported XID {xid}"


def _ecc(node: ClusterNode, options: Options) -> str:
    count = int(options.get("times") or 1)
    node.machine.control.add_ecc_errors(options["gpu"], count)
    return f"GPU {options['gpu']} has {count} more memory errors that cannot be corrected"


def _gpu_set(node: ClusterNode, options: Options) -> str:
    values: dict[str, Any] = {}
    for entry in options["set"]:
        name, equals, value = str(entry).partition("=")
        if not equals or not value.isascii() or not value.isdigit():
            raise ValueError(f"{entry!r} is not NAME=NUMBER")
        values[name] = int(value)
    node.machine.control.set_gpu(options["gpu"], **values)
    return f"GPU {options['gpu']}: {', '.join(options['set'])}"


def _gpu_reset(node: ClusterNode, options: Options) -> str:
    node.machine.control.recover_gpu(options["gpu"])
    return f"GPU {options['gpu']} was reset"


def _driver_unload(node: ClusterNode, options: Options) -> str:
    try:
        node.machine.control.unload_driver(force=bool(options.get("force")))
    except DriverInUseError as error:
        raise ConfigError(
            "DRA-SIM-FAULT",
            f"{node.name}: {error}",
            remedy="Give --force, or let go of NVML first (SIGUSR1).",
        ) from error
    return "the NVIDIA kernel driver is unloaded"


def _library_missing(node: ClusterNode, _options: Options) -> str:
    node.machine.control.remove_library()
    return "the driver's libraries are gone"


def _plugin_stop(node: ClusterNode, _options: Options) -> str:
    node.stop_driver()
    return "the DRA driver's process is stopped"


def _plugin_kill(node: ClusterNode, _options: Options) -> str:
    node.stop_driver(kill=True)
    node.start_driver()
    return "the DRA driver was killed with -9 and started again"


def _keeper_stop(node: ClusterNode, _options: Options) -> str:
    if node.keeper is not None:
        node.keeper.stop()
    return "the MPS keeper's process is stopped; its daemons run on"


def _keeper_kill(node: ClusterNode, _options: Options) -> str:
    if node.keeper is not None:
        node.keeper.stop(kill=True)
        node.keeper.start()
    return "the MPS keeper was killed with -9 and started again"


def _mps_kill(node: ClusterNode, _options: Options) -> str:
    killed = node.keeper.kill_daemons() if node.keeper is not None else 0
    if not killed:
        raise _wrong(f"{node.name} has no MPS control daemon", "Run a pod that asks for strategy MPS first.")
    return f"{killed} MPS control daemon(s) were killed with -9"


def _kubelet_restart(node: ClusterNode, _options: Options) -> str:
    node.restart_kubelet()
    return "the kubelet was restarted; it has wiped the node's slices"


def _iommu_off(node: ClusterNode, _options: Options) -> str:
    node.machine.pci.set_iommu(False)
    return "the kernel runs without an IOMMU"


def _gpu_held(node: ClusterNode, options: Options) -> str:
    gpu = int(options["gpu"])
    node.machine.pci.hold(gpu, _HOLDER, "dcgm-exporter")
    return f"dcgm-exporter (pid {_HOLDER}) has GPU {gpu} open"


NODE_FAULTS: dict[str, NodeFault] = {
    "nvml": NodeFault("NVML calls fail, are slow or hang (--function, --error, --seconds, --hang, --gpu, --times)", _nvml),
    "gpu-lost": NodeFault("a GPU falls off the bus (--gpu, --xid)", _gpu_lost, ("gpu",)),
    "gpu-removed": NodeFault("a GPU is taken out (--gpu)", _gpu_removed, ("gpu",)),
    "xid": NodeFault("a GPU or a MIG device reports an XID, once (--gpu, --xid, --mig UUID, --times)", _xid, ("gpu", "xid")),
    "ecc": NodeFault("memory errors that cannot be corrected (--gpu, --times)", _ecc, ("gpu",)),
    "gpu-set": NodeFault("what NVML reports about a GPU (--gpu, --set temperature=95)", _gpu_set, ("gpu", "set")),
    "gpu-reset": NodeFault("a GPU is reset, once (--gpu)", _gpu_reset, ("gpu",)),
    "gpu-held": NodeFault("a process keeps a GPU open (--gpu)", _gpu_held, ("gpu",)),
    "iommu-off": NodeFault("the kernel runs without an IOMMU", _iommu_off),
    "driver-unload": NodeFault("the NVIDIA kernel driver is unloaded (--force: although in use)", _driver_unload),
    "library-missing": NodeFault("the NVIDIA driver's libraries are gone", _library_missing),
    "plugin-stop": NodeFault("the DRA driver's process ends", _plugin_stop),
    "plugin-kill": NodeFault("the DRA driver's process is killed and started again, once", _plugin_kill),
    "keeper-stop": NodeFault("the MPS keeper's process ends", _keeper_stop),
    "keeper-kill": NodeFault("the MPS keeper's process is killed and started again, once", _keeper_kill),
    "mps-kill": NodeFault("the node's MPS control daemons are killed, once", _mps_kill),
    "kubelet-restart": NodeFault("the kubelet starts anew and wipes its slices, once", _kubelet_restart),
}  # fmt: skip

# kind -> (fault of the server, its settings, help)
API_FAULTS: dict[str, tuple[str, Json, str]] = {
    "delay": ("delay", {"seconds": 1.0}, "answers come late (--seconds)"),
    "conflict": ("error", {"code": 409}, "409 Conflict"),
    "throttle": ("error", {"code": 429, "retry_after": 1}, "429 Too Many Requests, Retry-After 1"),
    "error": ("error", {"code": 500}, "another status (--code)"),
    "gone": ("gone", {}, "watches end with 410 Gone"),
    "freeze": ("freeze", {}, "no answer comes"),
    "drop": ("drop", {}, "answers break off"),
    "down": ("", {}, "connections are refused"),
}
KINDS = (*NODE_FAULTS, *API_FAULTS)


class Switchboard:
    """The switches of one cluster. Calls come one at a time."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster

    def switch_on(self, target: str, kind: str, options: Options) -> str:
        """Switch a fault on; gives a sentence that says what happened.

        Raises:
            ConfigError: DRA-SIM-FAULT: no such target or fault, or it needs more.
        """
        if target == API:
            return self._api_fault(kind, options)
        node = self._node(target)
        fault = NODE_FAULTS.get(kind)
        if fault is None:
            raise _wrong(f"a node has no fault {kind!r}", f"Known: {', '.join(NODE_FAULTS)}.")
        missing = [f"--{name}" for name in fault.needs if options.get(name) is None]
        if missing:
            raise _wrong(
                f"{kind} needs {' and '.join(missing)}", "For example: --gpu 3, a GPU's minor number."
            )
        try:
            return f"{target}: {fault.act(node, options)}"
        except ValueError as error:
            raise _wrong(f"{target}: {error}", fault.help) from error

    def _api_fault(self, kind: str, options: Options) -> str:
        if kind not in API_FAULTS:
            raise _wrong(f"the API server has no fault {kind!r}", f"Known: {', '.join(API_FAULTS)}.")
        name, settings, text = API_FAULTS[kind]
        if kind == "down":
            self._cluster.api.faults.refuse()
            return f"api: {text}"
        given = {
            "method": options.get("method"), "path": options.get("path"), "times": options.get("times"),
            "seconds": options.get("seconds"), "code": options.get("code"),
        }  # fmt: skip
        _check_api_options(given)
        chosen = {**settings, **{key: value for key, value in given.items() if value is not None}}
        self._cluster.api.faults.set(name, **chosen)  # type: ignore[arg-type]
        return f"api: {text}"

    def clear(self, target: str = "") -> list[str]:
        """Take back all that can be taken back, of one target or of all; gives what was on.

        Raises:
            ConfigError: DRA-SIM-FAULT: no such target.
        """
        was = [
            f"{fault['target']}: {fault['fault']}"
            for fault in self.active()
            if target in {"", fault["target"]}
        ]
        if target in {"", API}:
            self._cluster.api.faults.clear()
        names = list(self._cluster.nodes) if not target else [] if target == API else [target]
        for name in names:
            self._clear_node(self._node(name))
        return was

    @staticmethod
    def _clear_node(node: ClusterNode) -> None:
        control = node.machine.control
        control.clear()
        node.machine.pci.let_go(_HOLDER)
        state = control.state
        if not state.iommu:
            node.machine.pci.set_iommu(True)
        if not state.library_version:
            control.install_library()
        if not state.module_version:
            control.load_driver()
        for gpu in state.gpus:
            if gpu.lost or gpu.recovery_action:
                control.recover_gpu(gpu.uuid)
            if not gpu.present:
                control.add_gpu(gpu.uuid)
        node.start_driver()
        if node.keeper is not None:
            node.keeper.start()

    def active(self) -> list[Json]:
        """Give what is on now: target, fault, detail."""
        found = [
            {"target": name, "fault": fault, "detail": detail}
            for name, node in self._cluster.nodes.items()
            for fault, detail in _node_faults(node)
        ]
        faults = self._cluster.api.faults
        if faults.refusing:
            found.append({"target": API, "fault": "down", "detail": ""})
        return found + [
            {"target": API, "fault": _api_name(fault), "detail": _api_detail(fault)} for fault in faults.on()
        ]

    def _node(self, name: str) -> ClusterNode:
        node = self._cluster.nodes.get(name)
        if node is not None:
            return node
        if name in self._cluster.in_process.nodes:
            raise _wrong(
                f"node {name} runs without a driver process and has no switches",
                "Start the cluster with a larger --real.",
            )
        raise _wrong(f"there is no node {name!r}", f"Known: api, {', '.join(self._cluster.nodes)}.")


def _wrong(message: str, remedy: str) -> ConfigError:
    return ConfigError("DRA-SIM-FAULT", message, remedy=remedy)


def _node_faults(node: ClusterNode) -> list[tuple[str, str]]:
    state = node.machine.control.state
    minors = {slot.uuid: slot.minor for slot in node.machine.profile.gpus}
    found: list[tuple[str, str]] = []
    if not node.driver_runs:
        found.append(("plugin-stop", f"log: {node.log}"))
    if node.keeper is not None and not node.keeper.runs:
        found.append(("keeper-stop", f"log: {node.keeper.log}"))
    if not state.library_version:
        found.append(("library-missing", ""))
    if not state.module_version:
        found.append(("driver-unload", ""))
    if not state.iommu:
        found.append(("iommu-off", ""))
    found += [("gpu-held", f"gpu {gpu}") for gpu in node.machine.pci.held_by(_HOLDER)]
    for gpu in state.gpus:
        if gpu.lost:
            found.append(("gpu-lost", f"gpu {minors.get(gpu.uuid)}"))
        if not gpu.present:
            found.append(("gpu-removed", f"gpu {minors.get(gpu.uuid)}"))
        if gpu.recovery_action:
            found.append(
                ("xid", f"gpu {minors.get(gpu.uuid)} asks for recovery action {gpu.recovery_action}")
            )
    for fault in state.faults:
        where = f"gpu {minors.get(fault.gpu)} " if fault.gpu else ""
        does = [
            f"error {fault.error}" if fault.error else "",
            f"{fault.delay_seconds:g} s late" if fault.delay_seconds else "",
            "hangs" if fault.hang else "",
            f"{fault.times} more times" if fault.times >= 0 else "",
        ]
        found.append(("nvml", f"{fault.function} {where}{', '.join(filter(None, does))}"))
    return found


def _check_api_options(given: Options) -> None:
    """Refuse what the server could not do.

    Raises:
        ConfigError: DRA-SIM-FAULT.
    """
    seconds, code, times, path = (given.get(key) for key in ("seconds", "code", "times", "path"))
    if seconds is not None and not 0 <= seconds < float("inf"):
        raise _wrong(f"--seconds {seconds} is no time", "Give a number from 0.")
    if code is not None and not 400 <= code <= 599:
        raise _wrong(f"--code {code} is no status of a failure", "Give 400 to 599.")
    if times is not None and times < 1:
        raise _wrong(f"--times {times} hits no request", "Give a number from 1.")
    try:
        re.compile(path or "")
    except re.error as error:
        raise _wrong(
            f"--path {path!r} is no regular expression: {error}", "For example: --path /pods"
        ) from error


def _api_name(fault: ApiFault) -> str:
    for name, (kind, settings, _) in API_FAULTS.items():
        if kind == fault.kind and settings.get("code", fault.code) == fault.code:
            return name
    return "error" if fault.kind == "error" else fault.kind


def _api_detail(fault: ApiFault) -> str:
    left = "" if fault.times is None else f", {max(0, fault.times - fault.hits)} more times"
    code = (
        f" {fault.code}"
        if fault.kind == "error"
        else f" {fault.seconds:g} s"
        if fault.kind == "delay"
        else ""
    )
    return f"{fault.method} {fault.path}{code}{left}, hit {fault.hits} times"
