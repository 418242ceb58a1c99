"""The main job end to end: real driver process, real sockets, simulated GPUs, cluster and containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from dra.cli.main import main
from dra.errors import ConfigError
from dra.sim.cluster import SimCluster, parse_nodes
from dra.sim.demo import CHAPTERS, Demo

ROOT = Path(__file__).parents[2]


def test_the_demo_tells_the_whole_story_and_leaves_nothing_behind():
    """Each chapter checks what its containers see; the end checks that nothing is left."""
    told: list[str] = []
    Demo(ROOT / "examples", ROOT / "deploy/manifests", told.append).run()
    text = "\n".join(told)
    for chapter in CHAPTERS:
        assert f"examples/{chapter.file}" in text
    assert "container trainer/main sees 2 GPU(s): " in text
    assert text.count("NVIDIA H100 80GB HBM3 (UUID: GPU-") >= 16
    assert "0/1 nodes are available: 1 cannot allocate all claims" in text
    assert "GPU 0 of the node has time-slice Long" in text
    assert "set_default_active_thread_percentage 50; set_default_device_pinned_mem_limit GPU-" in text
    assert text.count("the GPU is as it was") == 2
    assert "pods: 0   claims: 0   CDI files: 0   claim records: 0" in text


def test_the_demo_without_the_examples_says_where_to_run_it(tmp_path, capsys):
    assert main(["sim", "demo", "--examples", str(tmp_path / "none")]) == 1
    assert "DRA-SIM-EXAMPLES" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("dgx-h100", [("dgx-h100-0", "dgx-h100")]),
        ("t4-x1x2", [("t4-x1-0", "t4-x1"), ("t4-x1-1", "t4-x1")]),
        ("l40s-x4, dgx-a100", [("l40s-x4-0", "l40s-x4"), ("dgx-a100-0", "dgx-a100")]),
    ],
)
def test_nodes_are_written_as_profiles_with_an_optional_count(text, nodes):
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["", "abacus", "dgx-h100x0", "dgx-h100x9999", "x4"])
def test_other_text_is_refused_with_the_known_profiles(text):
    with pytest.raises(ConfigError, match="DRA-SIM-NODES"):
        parse_nodes(text)


def test_a_root_that_is_too_long_for_sockets_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="107 bytes"):
        SimCluster(tmp_path / ("x" * 60), [("a", "dgx-h100")])
