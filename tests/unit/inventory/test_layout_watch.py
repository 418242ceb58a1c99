"""Changes of partitions that the kernel lists, between two looks at the hardware."""

from __future__ import annotations

import pytest

from dra.host.paths import HostPaths
from dra.inventory.layout_watch import LayoutWatch
from dra.inventory.model import Inventory
from dra.nvml.kernel import mig_layouts
from dra.sim.node import SimulatedNode


class Rig:
    def __init__(self):
        self.layout: object = "a"
        self.news, self.tidied, self.pause = [], 0, None
        self.watch = LayoutWatch(
            lambda: self.layout, tidy=self._tidy, changed=lambda: self.news.append(self.layout)
        )
        self.scan = self.watch.around(self._scan)
        self.during = lambda: None

    def _tidy(self):
        self.tidied += 1
        return self.pause

    def _scan(self):
        self.during()
        return Inventory()


def test_only_what_comes_after_a_look_is_news():
    rig = Rig()
    rig.scan()
    rig.watch.tidy()
    assert rig.news == []
    rig.layout = "b"
    rig.watch.tidy()
    assert rig.news == ["b"]
    rig.scan()
    rig.watch.tidy()
    assert rig.news == ["b"]


def test_a_change_during_a_look_leads_to_another_one():
    rig = Rig()

    def change():
        rig.layout = "b"

    rig.during = change
    rig.scan()
    rig.watch.tidy()
    assert rig.news == ["b"]


@pytest.mark.parametrize(("pause", "seconds"), [(None, 2.0), (60.0, 2.0), (0.5, 0.5)])
def test_the_other_work_of_the_pause_is_done_and_its_hurry_kept(pause, seconds):
    rig = Rig()
    rig.pause = pause
    rig.scan()
    assert (rig.watch.tidy(), rig.tidied) == (seconds, 1)


def test_the_kernel_lists_partitions_made_and_destroyed_and_nothing_without_mig(tmp_path):
    node = SimulatedNode("h100-nvl-x2", tmp_path / "a", real_nodes=False)
    paths = HostPaths(**node.paths_kwargs())
    empty = mig_layouts(paths)
    assert empty == {"gpu0": (), "gpu1": ()}
    node.control.set_mig_layout(1, [("3g.47gb", 0), ("1g.12gb", 6)])
    cut = mig_layouts(paths)
    assert cut["gpu0"] == ()
    assert len([name for name in cut["gpu1"] if "/" not in name]) == 2
    node.control.set_mig_layout(1, [])
    assert mig_layouts(paths) == empty
    other = SimulatedNode("l40s-x4", tmp_path / "b", real_nodes=False)
    assert not any(mig_layouts(HostPaths(**other.paths_kwargs())).values())
