"""What a spec says, tier by tier, from plain values."""

import pytest

from dra.cdi.edits import build_claim_spec
from dra.cdi.exposure import choose_exposure, common_edits, hook, mount_names
from dra.cdi.model import CdiDevice, CdiOptions, DeviceNode, GpuNodes, Mount, NodeFiles
from dra.cdi.spec import check
from dra.errors import BugError, StackError
from dra.host.driver_files import DriverFile, DriverFiles, Library
from dra.host.driver_lists import CAPABILITIES
from tests.unit.cdi.node import BDF, UID, VERSION

HOOK = "/usr/bin/nvidia-cdi-hook"
C, U, G, D = (frozenset({name}) for name in ("compute", "utility", "graphics", "display"))


def lib(stem, *names, subdir="", capabilities=C, directory="/usr/lib64"):
    place = f"{directory}/{subdir}" if subdir else directory
    return Library(f"{place}/lib{stem}.so.{VERSION}", names, subdir, capabilities)


DRIVER = DriverFiles(
    version=VERSION,
    machine="x86_64",
    library_dirs=("/usr/lib64",),
    libraries=(
        lib("cuda", "libcuda.so.1", "libcuda.so"),
        lib("nvidia-allocator", "libnvidia-allocator.so.1"),
        lib("nvidia-gpucomp"),
        lib("nvidia-ml", "libnvidia-ml.so.1", capabilities=U | C),
        lib("vdpau_nvidia", "libvdpau_nvidia.so.1", subdir="vdpau", capabilities=frozenset({"video"})),
        lib("glxserver_nvidia", "libglxserver_nvidia.so", subdir="nvidia/xorg", capabilities=D),
    ),
    binaries=(DriverFile("/usr/lib/nvidia/smi", "/usr/bin/nvidia-smi", U),),
    firmware=(DriverFile("/usr/lib/firmware/x.bin", "/lib/firmware/x.bin", CAPABILITIES),),
    sockets=(
        DriverFile("/run/nvidia-persistenced/socket", "/run/nvidia-persistenced/socket", U, is_socket=True),
    ),
    configuration=(
        DriverFile("/usr/share/vulkan/icd.d/nvidia_icd.json", "/etc/vulkan/icd.d/nvidia_icd.json", G),
    ),
)


def node(*, hook_path="", root="/", links=(), **gpus):
    host = "" if root == "/" else f"{root}/dev/nvidia0"
    return NodeFiles(
        driver=DRIVER,
        driver_root_host=root,
        control_nodes=(DeviceNode("/dev/nvidiactl", 195, 255),),
        gpus={0: GpuNodes(DeviceNode("/dev/nvidia0", 195, 0, host_path=host), links=links),
              1: GpuNodes(DeviceNode("/dev/nvidia1", 195, 1))},
        hook_path=hook_path,
    )  # fmt: skip


def spec_for(*devices, where=None, **options):
    spec = build_claim_spec(
        claim_uid=UID,
        devices=devices or (CdiDevice("gpu-0", 0, BDF),),
        node=where or node(),
        options=CdiOptions(**options),
    )
    check(spec)
    return spec


def targets(spec):
    return {mount["containerPath"]: mount["hostPath"] for mount in spec["containerEdits"]["mounts"]}


def commands(spec):
    return [entry["args"][1] for entry in spec["containerEdits"].get("hooks", [])]


# -- which way ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "found", "chosen"),
    [
        ("auto", HOOK, "hooks"), ("auto", "", "soname"), ("soname", HOOK, "soname"),
        ("ld-library-path", "", "ld-library-path"), ("hooks", HOOK, "hooks"),
    ],
)  # fmt: skip
def test_hooks_are_used_only_where_the_program_is(asked, found, chosen):
    assert choose_exposure(CdiOptions(exposure=asked), found) == chosen


def test_hooks_that_were_asked_for_and_cannot_run_are_an_error_not_a_container_that_never_starts():
    with pytest.raises(StackError, match=r"DRA-CDI-HOOK-MISSING.*/opt/hook.*--cdi-exposure=auto"):
        choose_exposure(CdiOptions(exposure="hooks", hook_path="/opt/hook"), "")


# -- tier by tier ------------------------------------------------------------------------------------------------


def test_with_hooks_a_library_is_mounted_once_and_its_names_are_links():
    spec = spec_for(where=node(hook_path=HOOK))
    libraries = [path for path in targets(spec) if ".so" in path]
    assert f"/usr/lib64/libcuda.so.{VERSION}" in libraries
    assert len(libraries) == 5
    assert commands(spec) == [
        "create-symlinks", "enable-cuda-compat", "update-ldcache", "disable-device-node-modification"
    ]  # fmt: skip
    links = spec["containerEdits"]["hooks"][0]["args"][2:]
    assert f"libcuda.so.{VERSION}::/usr/lib64/libcuda.so.1" in links
    assert "libcuda.so.1::/usr/lib64/libcuda.so" in links
    assert "../libnvidia-allocator.so.1::/usr/lib64/gbm/nvidia-drm_gbm.so" in links
    folders = spec["containerEdits"]["hooks"][2]["args"][2:]
    assert folders == ["--folder", "/usr/lib64", "--folder", "/usr/lib64/vdpau"]


def test_every_hook_has_a_fixed_environment():
    spec = spec_for(
        where=node(hook_path=HOOK, links=(("../card1", "/dev/dri/by-path/x"),)), capabilities=CAPABILITIES
    )
    hooks = spec["containerEdits"]["hooks"] + spec["devices"][0]["containerEdits"]["hooks"]
    assert len(hooks) == 7
    assert all(entry["env"] == ["NVIDIA_CTK_DEBUG=false"] for entry in hooks)


def test_nvidia_ctk_can_stand_in_for_the_hook_program():
    assert hook("/usr/bin/nvidia-ctk", "x")["args"] == ["nvidia-ctk", "hook", "x"]
    assert hook("/opt/my-hook", "x")["args"] == ["nvidia-cdi-hook", "x"]


def test_without_hooks_a_library_stands_under_every_name_where_any_loader_looks():
    spec = spec_for(exposure="soname")
    found = targets(spec)
    source = f"/usr/lib64/libcuda.so.{VERSION}"
    for directory in ("/usr/lib/x86_64-linux-gnu", "/usr/lib64"):
        for name in (f"libcuda.so.{VERSION}", "libcuda.so.1", "libcuda.so"):
            assert found[f"{directory}/{name}"] == source
        assert f"{directory}/vdpau/libvdpau_nvidia.so.1" in found
        assert f"{directory}/gbm/nvidia-drm_gbm.so" in found
    assert commands(spec) == []
    assert not any(entry.startswith("LD_LIBRARY_PATH") for entry in spec["containerEdits"]["env"])


def test_an_arm_driver_goes_to_arm_directories_and_an_administrator_may_name_others():
    arm = DriverFiles(**{name: getattr(DRIVER, name) for name in DRIVER.__slots__} | {"machine": "aarch64"})
    where = NodeFiles(arm, "/", (), {})
    env = common_edits(where, CdiOptions(exposure="soname")).env
    assert "NVIDIA_CTK_LIBCUDA_DIR=/usr/lib/aarch64-linux-gnu:/usr/lib64" in env
    mounts = common_edits(where, CdiOptions(exposure="soname", library_dirs=("/opt/lib",))).mounts
    assert all(
        mount.container_path.startswith("/opt/lib/") for mount in mounts if ".so" in mount.container_path
    )


def test_the_private_directory_is_named_in_ld_library_path():
    spec = spec_for(exposure="ld-library-path")
    assert "LD_LIBRARY_PATH=/usr/local/nvidia/lib64" in spec["containerEdits"]["env"]
    assert {path.rpartition("/")[0] for path in targets(spec) if ".so" in path} == {
        "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib64/gbm"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("libx.so.1",), (f"libx.so.{VERSION}", "libx.so.1", "libx.so")),
        ((), (f"libx.so.{VERSION}",)),
        (("libx.so",), (f"libx.so.{VERSION}", "libx.so")),
    ],
)
def test_a_library_private_to_the_driver_gets_no_bare_name(names, expected):
    assert mount_names(lib("x", *names)) == expected


# -- what is in it -----------------------------------------------------------------------------------------------


def test_files_keep_their_exec_bit_and_mounts_do_not_leak_to_the_host():
    for mount in spec_for(exposure="soname")["containerEdits"]["mounts"]:
        socket = mount["containerPath"].endswith("/socket")
        assert {"rbind", "rprivate", "nosuid", "nodev"} <= set(mount["options"])
        assert ("noexec" in mount["options"]) == socket
        assert ("ro" in mount["options"]) != socket


def test_the_real_file_is_mounted_where_programs_look_for_it():
    assert targets(spec_for())["/usr/bin/nvidia-smi"] == "/usr/lib/nvidia/smi"


def test_a_driver_root_stands_before_host_paths_only():
    spec = spec_for(where=node(root="/run/nvidia/driver"))
    assert targets(spec)["/usr/bin/nvidia-smi"] == "/run/nvidia/driver/usr/lib/nvidia/smi"
    (entry,) = spec["devices"][0]["containerEdits"]["deviceNodes"]
    assert (entry["path"], entry["hostPath"]) == ("/dev/nvidia0", "/run/nvidia/driver/dev/nvidia0")


def test_a_host_path_that_says_nothing_new_is_left_out():
    (entry,) = spec_for()["devices"][0]["containerEdits"]["deviceNodes"]
    assert entry == {
        "path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 0o666, "permissions": "rw"
    }  # fmt: skip


def test_sockets_can_be_left_out():
    assert "/run/nvidia-persistenced/socket" in targets(spec_for())
    assert not any("socket" in path for path in targets(spec_for(sockets=False)))


def test_capabilities_narrow_what_is_mounted():
    found = targets(spec_for(capabilities=U))
    assert "/usr/bin/nvidia-smi" in found
    assert "/usr/lib64/libnvidia-ml.so.1" in found
    assert not any("libcuda" in path or "vdpau" in path or "vulkan" in path for path in found)
    assert not any("xorg" in path for path in targets(spec_for()))
    assert any("xorg" in path for path in targets(spec_for(capabilities=CAPABILITIES)))
    compute = spec_for(capabilities=U, where=node(hook_path=HOOK))
    assert "enable-cuda-compat" not in commands(compute)


def test_the_legacy_runtime_is_told_to_add_nothing_in_every_tier():
    for exposure in ("soname", "ld-library-path", "hooks"):
        spec = spec_for(exposure=exposure, where=node(hook_path=HOOK))
        assert "NVIDIA_VISIBLE_DEVICES=void" in spec["containerEdits"]["env"]


def test_access_for_monitoring_gets_the_same_nodes():
    plain, admin = (spec_for(CdiDevice("gpu-0", 0, BDF, admin=admin)) for admin in (False, True))
    assert plain == admin


def test_shares_of_one_device_have_names_of_their_own():
    shares = [CdiDevice("gpu-0", 0, BDF, share_id=share * 8) for share in ("ab12", "cd34")]
    names = [device["name"] for device in spec_for(*shares)["devices"]]
    assert names == [f"{UID}-gpu-0-ab12ab12", f"{UID}-gpu-0-cd34cd34"]


def test_two_requests_for_one_device_make_one_entry_and_order_does_not_matter():
    first, second = CdiDevice("gpu-0", 0, BDF), CdiDevice("gpu-1", 1, BDF)
    assert spec_for(first, second, first) == spec_for(second, first)


def test_two_different_devices_of_one_name_or_none_at_all_are_a_bug():
    one = CdiDevice("gpu-0", 0, BDF)
    with pytest.raises(BugError, match=f"{UID}-gpu-0"):
        spec_for(one, CdiDevice("gpu-0", 1, BDF))
    with pytest.raises(BugError, match="no devices"):
        build_claim_spec(claim_uid=UID, devices=(), node=node(), options=CdiOptions())


def test_what_other_configuration_adds_stands_with_its_device_only():
    extra = CdiDevice(
        "gpu-0",
        0,
        BDF,
        extra_nodes=(DeviceNode("/dev/nvidia-caps/nvidia-cap66", 237, 66, mode=0o444),),
        extra_env=("CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps",),
        extra_mounts=(Mount("/var/lib/x/pipe", "/tmp/nvidia-mps", ("rw", "nosuid", "nodev", "bind")),),
    )
    spec = spec_for(extra, CdiDevice("gpu-1", 1, BDF))
    edits = spec["devices"][0]["containerEdits"]
    assert [entry["path"] for entry in edits["deviceNodes"]] == [
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap66",
    ]
    assert edits["env"] == ["CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps"]
    assert edits["mounts"][0]["containerPath"] == "/tmp/nvidia-mps"
    assert list(spec["devices"][1]["containerEdits"]) == ["deviceNodes"]


def test_links_by_path_need_the_hook_program():
    links = (("../card1", "/dev/dri/by-path/pci-0000:1a:00.0-card"),)
    (made,) = spec_for(where=node(hook_path=HOOK, links=links))["devices"][0]["containerEdits"]["hooks"]
    assert made["args"] == [
        "nvidia-cdi-hook", "create-symlinks", "--link", "../card1::/dev/dri/by-path/pci-0000:1a:00.0-card"
    ]  # fmt: skip
    assert "hooks" not in spec_for(where=node(links=links))["devices"][0]["containerEdits"]
