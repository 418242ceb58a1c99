"""`dra top`: what it says of devices, holders and those that deserve a look; and what it prints."""

from __future__ import annotations

import json
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.api.claim import AllocatedDevice, ClaimRef, Consumer
from dra.cli.main import main
from dra.diagnose.top import best_hole, duration
from dra.host.boot import boot_id
from dra.host.paths import HostPaths
from dra.inventory.scan import scan
from dra.nvml.node import session_of
from dra.prepare.record import Record, encode_record
from dra.sim.node import SimulatedNode

HOUR = 3600.0
POD = "11111111-2222-4333-8444-555555555555"


class TopNode:
    def __init__(self, root, profile: str) -> None:
        self.root, self.profile = root, profile
        self.node = SimulatedNode(profile, root)
        self.control = self.node.control
        self.paths = HostPaths(**self.node.paths_kwargs())

    def inventory(self):
        session = session_of(self.paths, library=self.node.library)
        try:
            return scan(session, self.paths, profiles=True)
        finally:
            session.close()

    def hold(
        self, name: str, device: str, *, age: float, pod: str = "trainer", uid: str = POD, admin: bool = False
    ):
        folder = self.paths.state_dir("gpu.nvidia.com") / "claims"
        folder.mkdir(parents=True, exist_ok=True)
        record = Record(
            ref=ClaimRef("team", name, f"uid-{name}"),
            state="prepared",
            boot_id=boot_id(self.paths),
            results=(AllocatedDevice("gpu", "gpu.nvidia.com", "n", device, admin_access=admin),),
            consumers=(Consumer("pods", pod, uid),),
        )
        path = folder / f"uid-{name}.json"
        path.write_bytes(encode_record(record))
        then = time.time() - age
        os.utime(path, (then, then))

    def process(self, minor: int, pid: int, pod: str, **options) -> None:
        self.control.add_process(minor, pid, **options)
        folder = self.paths.proc / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup").write_text(f"0::/kubepods/pod{pod}/{'a' * 64}\n" if pod else "0::/user.slice\n")
        (folder / "comm").write_text("python3\n")

    def json(self, capsys, *more: str, status: int = 0) -> dict:
        assert main(["top", "--once", "-o", "json", *self.arguments(), *more]) == status
        return {each["device"]: each for each in json.loads(capsys.readouterr().out)["devices"]}

    def arguments(self) -> list[str]:
        return ["--simulate", self.profile, "--host-root", str(self.root)]


@pytest.fixture
def new_node(tmp_path, monkeypatch):
    monkeypatch.setattr("dra.cli.top._ONCE_SECONDS", 0.01)
    made = []

    def make(profile: str = "l40s-x4") -> TopNode:
        made.append(TopNode(tmp_path / f"n{len(made)}", profile))
        return made[-1]

    return make


def flags(row) -> list[str]:
    return [flag["kind"] for flag in row["flags"]]


def test_states_of_gpus_at_work_idle_young_free_and_taken_by_a_stranger(new_node, capsys):
    node = new_node()
    node.hold("works", "gpu-0", age=HOUR)
    node.control.set_gpu(0, utilization_gpu=90, power_mw=300_000, temperature=70)
    node.process(0, 10, POD, memory_bytes=1 << 30)
    node.hold("sleeps", "gpu-1", age=HOUR / 2)
    node.hold("young", "gpu-2", age=30)
    node.process(3, 13, "", memory_bytes=2 << 30)
    rows = node.json(capsys)
    assert {name: row["state"] for name, row in rows.items()} == {
        "gpu-0": "busy", "gpu-1": "idle", "gpu-2": "held", "gpu-3": "foreign",
    }  # fmt: skip
    assert [flags(row) for row in rows.values()] == [[], ["idle"], [], ["foreign"]]
    busy = rows["gpu-0"]
    assert (busy["utilizationRatio"], busy["powerWatts"], busy["temperatureCelsius"]) == (0.9, 300, 70)
    (holder,) = busy["holders"]
    assert (holder["namespace"], holder["claim"], holder["consumers"]) == ("team", "works", ["pod trainer"])
    assert holder["allocatedSeconds"] == pytest.approx(HOUR, abs=600)
    assert rows["gpu-1"]["flags"][0]["text"].startswith("allocated 30 min, 0% (seen for ")
    (stranger,) = rows["gpu-3"]["foreignProcesses"]
    assert stranger == {"pid": 13, "command": "python3", "podUid": None, "memoryBytes": 2 << 30}


def test_how_old_idle_must_be_can_be_said(new_node, capsys):
    node = new_node()
    node.hold("sleeps", "gpu-1", age=HOUR)
    assert node.json(capsys, "--idle-after=120")["gpu-1"]["state"] == "held"
    assert node.json(capsys, "--idle-after=0")["gpu-1"]["state"] == "idle"


def test_a_partition_whose_load_is_not_known_is_never_idle(new_node, capsys):
    node = new_node("dgx-a100")
    node.control.set_mig_layout(0, [("1g.5gb", 0)])
    node.hold("part", "gpu-0-mig-1g5gb-19-0", age=100 * HOUR)
    row = node.json(capsys)["gpu-0-mig-1g5gb-19-0"]
    assert (row["state"], row["utilizationRatio"], row["flags"]) == ("unknown", None, [])


def test_from_hopper_on_a_partition_is_idle_when_it_is(new_node, capsys):
    node = new_node("dgx-h100")
    still, works = node.control.set_mig_layout(0, [("1g.10gb", 0), ("1g.10gb", 1)])
    node.control.set_mig(works, utilization=70)
    for start in (0, 1):
        node.hold(f"part-{start}", f"gpu-0-mig-1g10gb-19-{start}", age=HOUR)
    rows = {row["uuid"]: row for row in node.json(capsys).values()}
    assert (rows[still]["state"], flags(rows[still])) == ("idle", ["idle"])
    assert (rows[works]["state"], rows[works]["utilizationRatio"]) == ("busy", 0.7)


def test_a_gpu_of_which_claims_hold_partitions_is_not_free(new_node, capsys):
    node = new_node("dgx-h100")
    for gpu in (0, 1):
        node.control.set_mig_layout(gpu, [("1g.10gb", 0)])
    node.hold("part", "gpu-0-mig-1g10gb-19-0", age=30)
    rows = node.json(capsys)
    assert [rows[name]["state"] for name in ("gpu-0", "gpu-1", "gpu-2")] == ["cut", "free", "free"]


def test_partitions_that_lie_badly_are_said_to(new_node, capsys):
    node = new_node("dgx-h100")
    node.control.set_mig_layout(0, [("1g.10gb", 1), ("1g.10gb", 5)])
    node.control.set_mig_layout(1, [("1g.10gb", 5), ("1g.10gb", 6)])
    rows = node.json(capsys)
    assert flags(rows["gpu-0"]) == ["fragmented"]
    assert rows["gpu-0"]["flags"][0]["text"] == (
        "6 of 8 memory slices free, room for 2g.20gb; moved together it would be 4g.40gb"
    )
    assert flags(rows["gpu-1"]) == []


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_node_of_which_nothing_can_be_read_says_why_what_to_do_and_is_no_success(new_node, capsys, form):
    node = new_node()
    node.control.remove_library()
    assert main(["top", "--once", "-o", form, *node.arguments()]) == 1
    out = capsys.readouterr().out
    assert "DRA-NVML-LIBRARY-NOT-FOUND: node: libnvidia-ml.so.1 is not under the driver root" in out
    assert "install the NVIDIA driver on the node" in out


def test_a_gpu_that_is_lost_is_unreadable_and_the_exit_code_says_so(new_node, capsys):
    node = new_node()
    node.control.lose_gpu(2)
    row = node.json(capsys, status=1)["gpu-2"]
    assert (row["state"], flags(row)) == ("unreadable", ["unreadable"])
    assert "DRA-NVML-GPU-LOST" in row["flags"][0]["text"]


def test_sleeping_gpus_are_left_asleep_once_they_are_known(new_node, capsys):
    node = new_node()
    node.control.set_gpu(0, persistence=False)
    assert {row["state"] for row in node.json(capsys).values()} == {"free"}  # the first look must wake it


def test_the_node_is_not_changed_by_looking(new_node, capsys):
    node = new_node()
    folder = node.paths.state_dir("gpu.nvidia.com") / "claims"
    node.hold("c", "gpu-0", age=10)
    (folder / "uid-bad.json").write_text("{")
    before = sorted(path.name for path in folder.iterdir())
    node.json(capsys)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_claim_on_a_device_that_is_not_there_is_a_problem(new_node, capsys):
    node = new_node()
    node.hold("lost", "gpu-9", age=10)
    assert main(["top", "--once", *node.arguments()]) == 0
    assert "problem: claim team/lost holds gpu-9, which this node does not have" in capsys.readouterr().out


def test_a_gpu_that_a_claim_has_passed_through_has_a_line_and_is_no_problem(new_node, capsys):
    node = new_node()
    node.hold("vm", "gpu-vfio-9", age=10)
    assert main(["top", "--once", *node.arguments()]) == 0
    printed = capsys.readouterr().out
    assert "problem" not in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("gpu-vfio-9")]
    assert "passed through" in line and "held" in line and "team/vm" in line
    row = node.json(capsys)["gpu-vfio-9"]
    assert (row["state"], row["holders"][0]["claim"]) == ("held", "vm")


def test_the_table_has_a_line_for_each_holder(new_node, capsys):
    node = new_node()
    node.hold("one", "gpu-0", age=HOUR, pod="a", uid=POD)
    node.hold("two", "gpu-0", age=3 * HOUR, pod="b", uid=POD.replace("1", "2"))
    node.hold("watch", "gpu-0", age=HOUR, admin=True)
    assert main(["top", "--once", *node.arguments()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("4 devices, 1 held")
    assert lines[1].split()[:4] == ["DEVICE", "PRODUCT", "STATE", "LOAD"]
    assert "team/one" in lines[2]
    assert "pod a" in lines[2]
    assert "team/two" in lines[3]
    assert "3 h" in lines[3]
    assert len(lines) == 7


def test_it_goes_on_until_it_is_stopped(new_node, capsys, monkeypatch):
    node = new_node()
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("dra.cli.top.time.sleep", sleep)
    assert main(["top", "--interval=5", *node.arguments()]) == 130
    assert slept == [5, 5, 5]
    assert capsys.readouterr().out.count("DEVICE") == 3


def test_without_a_driver_it_says_so(new_node, capsys):
    node = new_node()
    node.control.unload_driver(force=True)
    assert main(["top", "--once", *node.arguments()]) == 1
    out = capsys.readouterr().out
    assert "0 devices" in out
    assert "problem: DRA-NVML-DRIVER-NOT-LOADED: node: " in out


def test_nonsense_is_refused(new_node, capsys):
    assert main(["top", "--once", "--interval=0", *new_node().arguments()]) == 2
    assert "DRA-CLI-RANGE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("layout", "best"),
    [
        ([], 8),
        ([("7g.80gb", 0)], 0),
        ([("3g.40gb", 0)], 4),
        ([("1g.10gb", 0)], 4),
        ([("1g.10gb", n) for n in range(7)], 0),
        ([("2g.20gb", 0), ("2g.20gb", 4)], 4),
    ],
)
def test_the_best_hole_is_that_of_the_best_arrangement(new_node, layout, best):
    node = new_node("dgx-h100")
    node.control.set_mig_layout(0, layout)
    assert best_hole(node.inventory().gpus[0]) == best


@given(st.floats(min_value=0, max_value=1e8))
def test_durations_are_short(seconds):
    assert len(duration(seconds)) <= 8


def test_durations_are_for_people():
    assert [duration(s) for s in (0, 59, 60, 1800, 7200, 5 * 3600, 200_000)] == [
        "0 s", "59 s", "1 min", "30 min", "2 h", "5 h", "2 d",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words", [["top", "--once"], ["doctor", "--offline"], ["inventory"]], ids=lambda words: words[0]
)
def test_a_look_at_a_machine_that_is_not_there_makes_none(tmp_path, capsys, words):
    place = tmp_path / "typo"
    assert main([*words, "--simulate", "l40s-x4", "--host-root", str(place)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: DRA-CLI-HOST-ROOT: --host-root {place} holds no simulated node\n")
    assert "leave --host-root out" in err
    assert not place.exists()
    place.mkdir()
    assert main([*words, "--simulate", "l40s-x4", "--host-root", str(place)]) == 2
    assert list(place.iterdir()) == []
