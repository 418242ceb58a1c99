"""Specs of rigs: a stand-in for NVML and little else. NVIDIA's driver runs there with warnings, and so do we."""

import json

import pytest

from dra.cdi.model import CdiDevice, CdiOptions
from dra.cdi.renderer import CdiRenderer
from dra.errors import StackError
from dra.sim.tree.elf import shared_object
from tests.unit.cdi.node import BDF, LIB, UID, VERSION, library, make_node, put

HOOK = "usr/bin/nvidia-cdi-hook"
TIERS = ("hooks", "soname", "ld-library-path")


@pytest.fixture
def rig(tmp_path):
    """A node with device nodes and an empty driver root."""
    put(tmp_path / HOOK, "#!/bin/sh\n", mode=0o755)
    return make_node(tmp_path, driver=False)


def spec_of(paths, tier, version=VERSION):
    renderer = CdiRenderer(paths, CdiOptions(exposure=tier))
    spec = renderer.render(UID, [CdiDevice("gpu-0", 0, BDF)], driver_version=version)
    return json.loads(renderer.files.write(UID, spec).read_text())["containerEdits"]


def targets(edits):
    return {mount["containerPath"] for mount in edits["mounts"]}


def commands(edits):
    return [hook["args"][1] for hook in edits.get("hooks", [])]


@pytest.mark.parametrize("tier", TIERS)
def test_an_nvml_without_libcuda_is_given_as_it_is(rig, tmp_path, tier):
    library(tmp_path / LIB, "nvidia-ml", "libnvidia-ml.so.1")
    edits = spec_of(rig, tier)
    names = {path.rpartition("/")[2] for path in targets(edits)}
    assert f"libnvidia-ml.so.{VERSION}" in names
    assert not any("libcuda" in name for name in names)
    # CUDA's forward compatibility without CUDA would be nonsense.
    assert "enable-cuda-compat" not in commands(edits)


def test_one_file_without_a_version_stands_under_the_name_that_programs_open(rig, tmp_path):
    put(tmp_path / LIB / "libnvidia-ml.so.1", shared_object("libnvidia-ml.so.1"))
    assert f"/{LIB}/libnvidia-ml.so.1" in targets(spec_of(rig, "hooks"))
    assert f"/{LIB}/libnvidia-ml.so.1" in targets(spec_of(rig, "soname"))
    assert "/usr/local/nvidia/lib64/libnvidia-ml.so.1" in targets(spec_of(rig, "ld-library-path"))


@pytest.mark.parametrize("tier", TIERS)
def test_a_rig_that_tells_no_version_at_all_gets_a_spec(rig, tmp_path, tier):
    for stem in ("nvidia-ml", "cuda"):
        put(tmp_path / LIB / f"lib{stem}.so.1", shared_object(f"lib{stem}.so.1"))
    edits = spec_of(rig, tier, version="")
    names = {path.rpartition("/")[2] for path in targets(edits)}
    assert {"libnvidia-ml.so.1", "libcuda.so.1"} <= names
    assert not any(
        arg.endswith("--host-driver-version=") for hook in edits.get("hooks", []) for arg in hook["args"]
    )


def test_a_root_with_no_library_at_all_stays_an_error(rig):
    with pytest.raises(StackError, match="DRA-DRIVER-LIBRARIES-MISSING"):
        spec_of(rig, "soname")
