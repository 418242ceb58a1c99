from dataclasses import replace

from dra.inventory.diff import diff
from dra.inventory.model import Inventory
from tests.unit.inventory.inventory_samples import gpu, inventory, mig, problem


def test_equal_inventories_differ_in_nothing():
    assert not diff(inventory(gpu(0), gpu(1)), inventory(gpu(0), gpu(1)))


def test_gpus_that_come_go_and_change_are_told_apart():
    changed = replace(gpu(1), mig_enabled=True, mig_devices=(mig(),))
    found = diff(inventory(gpu(0), gpu(1)), inventory(changed, gpu(2)))
    assert [each.minor for each in found.added] == [2]
    assert [each.minor for each in found.removed] == [0]
    assert [(change.after.minor, change.changed) for change in found.changed] == [
        (1, ("mig_enabled", "mig_devices"))
    ]
    assert found.publishes


def test_the_same_card_in_another_slot_is_a_change_not_two_events():
    moved = replace(gpu(0), minor=5)
    found = diff(inventory(gpu(0)), inventory(moved))
    assert (found.added, found.removed) == ((), ())
    assert found.changed[0].changed == ("minor",)


def test_another_card_in_the_same_slot_is_one_gone_and_one_new():
    found = diff(inventory(gpu(0)), inventory(replace(gpu(0), uuid="GPU-other")))
    assert (len(found.added), len(found.removed), found.changed) == (1, 1, ())


def test_a_driver_upgrade_is_published():
    found = diff(inventory(gpu(0)), inventory(gpu(0), driver="590.10"))
    assert found.versions
    assert found.publishes


def test_a_problem_is_news_once_whatever_its_text_counts():
    before = Inventory(problems=(problem("DRA-NVML-HUNG", message="for 20 s"),))
    after = Inventory(problems=(problem("DRA-NVML-HUNG", message="for 50 s"),))
    assert not diff(before, after)
    found = diff(before, Inventory(problems=(problem("DRA-NVML-TIMEOUT"),)))
    assert [each.code for each in found.new_problems] == ["DRA-NVML-TIMEOUT"]
    assert [each.code for each in found.gone_problems] == ["DRA-NVML-HUNG"]
    assert found
    assert not found.publishes
