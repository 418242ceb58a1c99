"""What a container gets from CDI edits, and what makes its creation fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dra.sim.runtime import CreateError, Runtime
from dra.sim.tree.elf import shared_object
from dra.sim.tree.golden import materialise_golden_tree
from dra.sim.tree.nodes import make_device_node

GOLDEN = Path(os.environ.get("DRA_GOLDEN", Path(__file__).parents[4] / "shared/golden"))
LIBS = "/usr/lib/x86_64-linux-gnu"


@pytest.fixture
def node(tmp_path):
    """A small host: two GPUs, a library, nvidia-smi and the hook program."""
    for minor in (0, 1, 255):
        name = "nvidiactl" if minor == 255 else f"nvidia{minor}"
        make_device_node(tmp_path / "dev" / name, 195, minor)
    library = tmp_path / LIBS.lstrip("/") / "libcuda.so.580.95.05"
    library.parent.mkdir(parents=True)
    library.write_bytes(shared_object("libcuda.so.1"))
    for program in ("nvidia-smi", "nvidia-cdi-hook"):
        path = tmp_path / "usr/bin" / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/true\n")
        path.chmod(0o755)
    (tmp_path / "var/run/cdi").mkdir(parents=True)
    return tmp_path


def put(node, *, common=None, name="claim", kind="a.b/cc", version="0.5.0", **devices):
    spec = {
        "cdiVersion": version,
        "kind": kind,
        "containerEdits": common or {},
        "devices": [{"name": device, "containerEdits": edits} for device, edits in devices.items()],
    }
    (node / f"var/run/cdi/{name}.yaml").write_text(json.dumps(spec))


def gpu(number, **more):
    return {"deviceNodes": [{"path": f"/dev/nvidia{number}", **more}]}


def create(node, *names, **options):
    return Runtime(node).create([f"a.b/cc={name}" for name in names], **options)


def test_only_the_gpu_that_was_asked_for_is_there(node):
    put(node, common={"deviceNodes": [{"path": "/dev/nvidiactl"}]}, g0=gpu(0), g1=gpu(1))
    view = create(node, "g1")
    assert view.gpus == (1,)
    assert set(view.device_nodes) == {"/dev/nvidia1", "/dev/nvidiactl"}
    assert (view.device_nodes["/dev/nvidia1"].major, view.device_nodes["/dev/nvidia1"].access) == (195, "rwm")


def test_a_node_the_host_does_not_have_is_fatal_and_named(node):
    put(node, g7=gpu(7))
    with pytest.raises(CreateError, match="failed to stat CDI host device '/dev/nvidia7'"):
        create(node, "g7")


def test_a_node_with_type_and_major_is_taken_as_written(node):
    put(node, cap=gpu(9, type="c", major=195, minor=9))
    assert create(node, "cap").gpus == (9,)


def test_a_wrong_type_is_fatal(node):
    put(node, g0=gpu(0, type="b"))
    with pytest.raises(CreateError, match="is of type c, not b"):
        create(node, "g0")


def test_a_host_path_says_where_the_numbers_come_from(node):
    put(node, g0={"deviceNodes": [{"path": "/dev/nvidia0", "hostPath": "/dev/nvidia1"}]})
    assert create(node, "g0").gpus == (1,)


def test_a_node_without_the_cgroups_leave_is_no_gpu(node):
    put(node, g0=gpu(0, permissions="m"))
    view = create(node, "g0")
    assert view.gpus == ()
    assert view.device_nodes["/dev/nvidia0"].access == "m"


def test_the_environment_of_the_spec_wins_over_the_images(node):
    put(node, common={"env": ["NVIDIA_VISIBLE_DEVICES=void"]}, g0=gpu(0))
    view = create(node, "g0", env={"NVIDIA_VISIBLE_DEVICES": "all", "HOME": "/"})
    assert view.env == {"NVIDIA_VISIBLE_DEVICES": "void", "HOME": "/"}


def test_common_edits_of_a_file_apply_once_for_all_its_devices(node):
    put(node, common={"env": ["A=1"]}, g0=gpu(0), g1=gpu(1))
    view = create(node, "g0", "g1", "g0")
    assert view.oci["process"]["env"] == ["A=1"]
    assert view.gpus == (0, 1)


def test_a_mount_whose_source_is_missing_is_fatal(node):
    put(node, g0={"mounts": [{"hostPath": "/usr/lib/none.so", "containerPath": "/usr/lib/none.so"}]})
    with pytest.raises(CreateError, match=r"error mounting /usr/lib/none\.so"):
        create(node, "g0")


def test_a_source_link_may_not_leave_the_host(node):
    (node / "escape").symlink_to("/" + "../" * 20 + "etc/hostname-of-nobody")
    (node / "inside").symlink_to("/usr/bin/nvidia-smi")
    put(node, g0={"mounts": [{"hostPath": "/inside", "containerPath": "/usr/bin/nvidia-smi"}]})
    assert create(node, "g0").binaries["nvidia-smi"] == node / "usr/bin/nvidia-smi"
    put(node, g0={"mounts": [{"hostPath": "/escape", "containerPath": "/x"}]})
    with pytest.raises(CreateError):
        create(node, "g0")


def test_a_mount_below_proc_is_refused_as_runc_does(node):
    mount = {"hostPath": "/usr/bin/nvidia-smi", "containerPath": "/proc/driver/nvidia/params"}
    put(node, g0={"mounts": [mount]})
    with pytest.raises(CreateError, match="inside /proc"):
        create(node, "g0")


def libcuda_mount(name):
    return {"hostPath": f"{LIBS}/libcuda.so.580.95.05", "containerPath": f"{LIBS}/{name}"}


def test_a_versioned_library_alone_is_not_found_by_its_soname(node):
    put(node, g0={"mounts": [libcuda_mount("libcuda.so.580.95.05")]})
    assert "libcuda.so.1" not in create(node, "g0").libraries


def test_a_mount_under_the_soname_is_found_where_the_image_looks(node):
    put(node, g0={"mounts": [libcuda_mount("libcuda.so.1")]})
    assert create(node, "g0").libraries["libcuda.so.1"] == node / LIBS.lstrip("/") / "libcuda.so.580.95.05"
    assert "libcuda.so.1" not in create(node, "g0", image="redhat").libraries


def test_the_hooks_make_links_and_fill_the_loaders_cache(node):
    def hook(*args):
        return {
            "hookName": "createContainer",
            "path": "/usr/bin/nvidia-cdi-hook",
            "args": ["nvidia-cdi-hook", *args],
        }

    put(
        node,
        common={
            "mounts": [libcuda_mount("libcuda.so.580.95.05")],
            "hooks": [
                hook("create-symlinks", "--link", f"libcuda.so.1::{LIBS}/libcuda.so"),
                hook("update-ldcache", f"--folder={LIBS}"),
                hook("a-hook-of-the-future", "--x"),
            ],
        },
        g0=gpu(0),
    )
    view = create(node, "g0", image="redhat")
    assert view.libraries["libcuda.so.1"] == node / LIBS.lstrip("/") / "libcuda.so.580.95.05"
    assert view.links == {f"{LIBS}/libcuda.so": "libcuda.so.1"}
    assert [args[1] for _, args in view.hooks] == [
        "create-symlinks",
        "update-ldcache",
        "a-hook-of-the-future",
    ]


def test_library_path_is_searched(node):
    mount = {"hostPath": f"{LIBS}/libcuda.so.580.95.05", "containerPath": "/opt/nv/libcuda.so.1"}
    put(node, common={"mounts": [mount], "env": ["LD_LIBRARY_PATH=/opt/nv"]}, g0=gpu(0))
    assert "libcuda.so.1" in create(node, "g0", image="redhat").libraries


@pytest.mark.parametrize("mode", [None, 0o644])
def test_a_hook_program_that_is_missing_or_not_executable_fails_the_container(node, mode):
    program = node / "usr/bin/nvidia-cdi-hook"
    program.unlink() if mode is None else program.chmod(mode)
    hook = {
        "hookName": "createContainer",
        "path": "/usr/bin/nvidia-cdi-hook",
        "args": ["nvidia-cdi-hook", "chmod"],
    }
    put(node, g0={"hooks": [hook]})
    with pytest.raises(CreateError, match="nvidia-cdi-hook"):
        create(node, "g0")


def test_an_unknown_device_fails_the_container_with_the_engines_words(node):
    with pytest.raises(CreateError, match="CDI device injection failed: unresolvable CDI devices"):
        create(node, "none")


def test_additional_groups_are_added_once_and_root_never(node):
    put(node, version="0.7.0", common={"additionalGids": [44, 0, 44]}, g0={"additionalGids": [44, 109]})
    assert create(node, "g0").oci["process"]["user"]["additionalGids"] == [44, 109]


def golden_node(root, name):
    """Write a golden tree as a host, with the reference generator's spec in its CDI directory."""
    tree = json.loads((GOLDEN / f"cdi/{name}.tree.json").read_text())
    materialise_golden_tree(tree, root)
    hook = root / "usr/bin/nvidia-cdi-hook"
    hook.write_text("#!/bin/true\n")
    hook.chmod(0o755)
    (root / "var/run/cdi").mkdir(parents=True, exist_ok=True)
    spec = (GOLDEN / f"cdi/{name}.yaml").read_text()
    (root / "var/run/cdi/nvidia.yaml").write_text(spec)
    return Runtime(root)


def test_a_spec_of_the_reference_generator_gives_a_working_container(tmp_path):
    if not (GOLDEN / "cdi").is_dir():
        pytest.skip("golden data is not at hand (DRA_GOLDEN)")
    runtime = golden_node(tmp_path, "a100-headless")
    view = runtime.create(["nvidia.com/gpu=1"])
    assert runtime.cache.errors == {}
    assert view.gpus == (1,)
    assert {"/dev/nvidiactl", "/dev/nvidia-uvm"} <= set(view.device_nodes)
    assert "nvidia-smi" in view.binaries
    assert "libcuda.so.580.95.05" in view.libraries
    assert (
        view.libraries["libcuda.so.1"]
        == view.libraries["libcuda.so"]
        == view.libraries["libcuda.so.580.95.05"]
    )
    assert view.env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert {args[1] for _, args in view.hooks} >= {"create-symlinks", "update-ldcache"}
