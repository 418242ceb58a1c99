"""The doctor's rung about passing GPUs through."""

from __future__ import annotations

import json

import pytest

from dra.api.claim import AllocatedDevice, ClaimRef
from dra.cli.main import main
from dra.diagnose.doctor.context import NodeContext
from dra.diagnose.doctor.driver_rungs import look_at_driver, look_at_nvml
from dra.diagnose.doctor.model import EXIT_CODES, state_of
from dra.diagnose.doctor.passthrough_rung import look_at_passthrough
from dra.host.boot import boot_id
from dra.host.paths import HostPaths
from dra.prepare.record import Record, encode_record
from dra.sim.node import SimulatedNode
from dra.sim.tree.nodes import make_link, write_text
from dra.values import PciAddress

DRIVER = "gpu.nvidia.com"
UID = "00000000-0000-4000-8000-000000000001"


class Machine:
    """A simulated node with two GPUs, as the doctor sees it."""

    def __init__(self, root):
        self.root = root
        self.sim = SimulatedNode("h100-nvl-x2", root, real_nodes=False)
        self.pci, self.paths = self.sim.pci, HostPaths(**self.sim.paths_kwargs())

    def context(self, *, passthrough=True):
        return NodeContext(self.paths, "node-a", library=self.sim.library, passthrough=passthrough)

    def look(self):
        """Give the rung's state, text, and its findings' codes."""
        looked = look_at_passthrough(self.context())
        return state_of(looked.findings), looked.text, [each.code for each in looked.findings]

    def hold(self, device):
        """Write a record of a claim that has a device."""
        results = (AllocatedDevice(request="r", driver=DRIVER, pool="node-a", device=device),)
        record = Record(ClaimRef("team", "vm", UID), "prepared", boot_id(self.paths), results=results)
        folder = self.paths.state_dir(DRIVER) / "claims"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{UID}.json").write_bytes(encode_record(record))


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_node_that_can_says_so(machine):
    text = "2 of 2 GPUs can be passed through, 0 are, by the IOMMU's groups and IOMMUFD"
    assert machine.look() == ("ok", text, [])
    machine.pci.set_iommufd(False)
    assert machine.look()[1].endswith("by the IOMMU's groups")


def test_without_an_iommu_a_person_should_look_and_nothing_is_broken(machine):
    machine.pci.set_iommu(False)
    assert machine.look() == ("warning", "", ["DRA-VFIO-NO-IOMMU"])


def test_a_gpu_with_a_claim_is_as_it_should_be_and_one_without_is_spoken_of(machine):
    machine.pci.bind(0, "vfio-pci")
    state, text, codes = machine.look()
    assert (state, codes) == ("ok", ["DRA-VFIO-BOUND-BY-HAND"])
    assert "1 are" in text
    machine.hold("gpu-vfio-0")
    assert machine.look()[2] == []


def test_what_is_not_offered_is_named_with_the_reason(machine):
    machine.pci.bind(0, "")
    machine.pci.set_virtual_functions(1, 2)
    looked = look_at_passthrough(machine.context())
    assert [each.code for each in looked.findings] == ["DRA-VFIO-NOT-OFFERED"] * 2
    assert "gpu-vfio-0 (PCI 0000:1b:00.0) has no kernel driver" in looked.findings[0].message
    assert "gpu-vfio-1 (PCI 0000:43:00.0) is cut into 2 virtual functions" in looked.findings[1].message
    assert looked.text.startswith("0 of 2 GPUs")


def test_a_group_with_others_in_it_names_them(machine):
    address = machine.pci.address_of(0)
    audio = PciAddress(address.domain, address.bus, address.device, 1)
    device = machine.paths.sys / "bus/pci/devices" / str(audio)
    write_text(device / "class", "0x040300\n")
    (machine.paths.sys / "bus/pci/drivers/snd_hda_intel").mkdir()
    make_link(device / "driver", "../../drivers/snd_hda_intel")
    make_link(machine.paths.sys / f"kernel/iommu_groups/20/devices/{audio}", str(device))
    looked = look_at_passthrough(machine.context())
    (found,) = looked.findings
    assert found.code == "DRA-VFIO-GROUP-SHARED"
    assert f"{audio} (snd_hda_intel)" in found.message


def test_a_kernel_without_the_module_is_told_of(machine):
    (aliases,) = (machine.root / "lib/modules").glob("*/modules.alias")
    aliases.write_text("alias pci:v000010DEd*sv*sd*bc03sc02i00* nvidia\n")
    looked = look_at_passthrough(machine.context())
    assert [each.code for each in looked.findings] == ["DRA-VFIO-MODULE-ABSENT"]
    aliases.unlink()
    assert "/lib/modules" in look_at_passthrough(machine.context()).findings[0].message
    machine.sim.kernel.load_module("vfio-pci")
    assert machine.look()[2] == []


@pytest.mark.parametrize("passthrough", [False, True])
def test_the_rungs_below_take_a_gpu_that_is_passed_through_for_lost_only_without_the_gate(
    machine, passthrough
):
    for minor in (0, 1):
        machine.pci.bind(minor, "vfio-pci")
    ctx = machine.context(passthrough=passthrough)
    codes = [each.code for look in (look_at_driver, look_at_nvml) for each in look(ctx).findings]
    assert codes == ([] if passthrough else ["DRA-GPU-OTHER-DRIVER"] * 2 + ["DRA-NVML-NO-GPU"])


def test_the_ladder_has_the_rung_where_the_gate_is_on(machine, capsys, monkeypatch):
    words = [
        "doctor",
        "--simulate",
        "h100-nvl-x2",
        "--host-root",
        str(machine.root),
        "--offline",
        "-o",
        "json",
    ]

    def rungs(*more):
        main([*words, *more])
        return [each["name"] for each in json.loads(capsys.readouterr().out)["rungs"]]

    assert "passthrough" not in rungs()
    assert rungs("--feature-gates", "PassthroughSupport=true")[-1] == "passthrough"
    # As it stands in the pod of the driver.
    monkeypatch.setenv("FEATURE_GATES", "DynamicMIG=true,PassthroughSupport=true")
    assert rungs()[-1] == "passthrough"
    assert EXIT_CODES["passthrough"] == 19
