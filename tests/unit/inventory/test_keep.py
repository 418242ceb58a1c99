import pytest

from dra.inventory.keep import Kept, plan_inventory
from dra.inventory.model import Inventory
from tests.unit.inventory.inventory_samples import gpu, inventory, problem

TWO = Kept(inventory(gpu(0), gpu(1)))


def blind(code):
    return Inventory(problems=(problem(code),))


def unusable(kept):
    return [each.unusable for each in kept.inventory.gpus]


def test_a_clean_scan_is_taken_as_it_is():
    scanned = inventory(gpu(0), gpu(1), gpu(2))
    assert plan_inventory(TWO, scanned) == Kept(scanned)


def test_a_node_that_never_had_a_driver_is_empty_with_the_reason():
    kept = plan_inventory(Kept(Inventory()), blind("DRA-NVML-LIBRARY-NOT-FOUND"))
    assert kept.inventory.gpus == ()
    assert [each.code for each in kept.inventory.problems] == ["DRA-NVML-LIBRARY-NOT-FOUND"]


@pytest.mark.parametrize("code", ["DRA-NVML-VERSION-MISMATCH", "DRA-NVML-DRIVER-NOT-LOADED", "DRA-NVML-HUNG"])
def test_gpus_stay_listed_but_unusable_while_the_driver_is_away(code):
    kept = plan_inventory(TWO, blind(code))
    assert unusable(kept) == [code, code]
    assert kept.inventory.driver_version == "580.95.05"
    assert plan_inventory(kept, TWO.inventory) == TWO


def test_the_reason_follows_what_the_node_suffers_from_now():
    kept = plan_inventory(
        plan_inventory(TWO, blind("DRA-NVML-DRIVER-NOT-LOADED")), blind("DRA-NVML-VERSION-MISMATCH")
    )
    assert unusable(kept) == ["DRA-NVML-VERSION-MISMATCH"] * 2


def test_a_session_let_go_of_on_request_changes_no_gpu():
    kept = TWO
    for _ in range(10):
        kept = plan_inventory(kept, blind("DRA-NVML-RELEASED"))
    assert unusable(kept) == ["", ""]


def test_a_passing_error_is_believed_only_when_it_stays():
    kept = TWO
    seen = []
    for _ in range(3):
        kept = plan_inventory(kept, blind("DRA-NVML-TIMEOUT"))
        seen.append(unusable(kept)[0])
    assert seen == ["", "", "DRA-NVML-TIMEOUT"]
    after_one_good = plan_inventory(plan_inventory(TWO, blind("DRA-NVML-TIMEOUT")), TWO.inventory)
    assert after_one_good.blind_scans == 0


def test_an_unplugged_gpu_is_removed():
    assert plan_inventory(TWO, inventory(gpu(0))).inventory == inventory(gpu(0))


def test_a_gpu_still_on_the_bus_is_lost_not_removed():
    kept = plan_inventory(TWO, inventory(gpu(0)), on_bus=lambda address: address == gpu(1).pci_address)
    assert [(each.minor, each.unusable) for each in kept.inventory.gpus] == [(0, ""), (1, "DRA-GPU-GONE")]
    assert kept.inventory.problems[0].subject == "0000:11:00.0"
    assert plan_inventory(kept, inventory(gpu(0))).inventory.gpus == (gpu(0),)


@pytest.mark.parametrize("name", ["gpu-1", "gpu-1-mig-1g5gb-19-0"])
def test_a_vanished_gpu_that_a_claim_holds_stays_until_it_is_let_go(name):
    kept = plan_inventory(TWO, inventory(gpu(0)), in_use=[name])
    assert unusable(kept) == ["", "DRA-GPU-GONE"]
    assert "a claim still holds it" in kept.inventory.problems[0].message
    assert plan_inventory(kept, inventory(gpu(0)), in_use=[]).inventory == inventory(gpu(0))


def test_a_card_put_in_the_place_of_a_held_one_takes_the_place():
    new = gpu(1, uuid="GPU-new")
    kept = plan_inventory(TWO, inventory(gpu(0), new), in_use=["gpu-1"])
    assert kept.inventory == inventory(gpu(0), new)
