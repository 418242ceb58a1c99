"""Rendering from a node as it is, call after call: the fact sheet's checklist as tests."""

import os
import threading
from dataclasses import dataclass

import pytest
import structlog

from dra.cdi.model import CdiDevice, CdiOptions, DeviceNode, Mount
from dra.cdi.renderer import CdiRenderer, parse_capabilities
from dra.cdi.spec import VERSIONS, check, encode, minimum_version, parse
from dra.errors import BugError, ConfigError, StackError
from dra.host.driver_lists import CAPABILITIES, DEFAULT_CAPABILITIES
from dra.host.paths import HostPaths
from dra.values import PciAddress
from tests.contract.cdi_container import start
from tests.unit.cdi.node import (
    BDF,
    DEVICES,
    LIB,
    UID,
    VERSION,
    install_driver,
    library,
    make_node,
    put,
    settle,
    stand_in,
)
from tests.yaml_text import read

GPU = CdiDevice("gpu-0", 0, BDF)
HOOK = "usr/bin/nvidia-cdi-hook"


@pytest.fixture
def paths(tmp_path):
    paths = make_node(tmp_path)
    settle(tmp_path)
    return paths


def render(renderer, *devices, uid=UID, version=VERSION):
    spec = renderer.render(uid, devices or [GPU], driver_version=version)
    check(spec)
    return spec


def uvm_major(spec):
    return next(
        node["major"] for node in spec["containerEdits"]["deviceNodes"] if node["path"] == "/dev/nvidia-uvm"
    )


@pytest.mark.parametrize("exposure", ["auto", "soname", "ld-library-path"])
def test_1_the_output_reads_again_under_the_strict_schema_and_its_version_suffices(paths, exposure):
    spec = render(CdiRenderer(paths, CdiOptions(exposure=exposure)))
    assert parse(encode(spec)) == read(encode(spec)) == spec
    assert VERSIONS.index(minimum_version(spec)) <= VERSIONS.index(spec["cdiVersion"])


@pytest.mark.parametrize("exposure", ["auto", "hooks", "soname", "ld-library-path"])
def test_the_bytes_put_together_from_kept_parts_are_those_of_the_whole_spec(paths, tmp_path, exposure):
    put(tmp_path / HOOK, "#!/bin/sh\n", mode=0o755)
    renderer = CdiRenderer(paths, CdiOptions(exposure=exposure))
    for devices in ([GPU], [GPU, CdiDevice("gpu-1", 1, BDF, extra_env=("N=\x85\u00e4\u2028",))]):
        spec = render(renderer, *devices)
        assert spec.data == encode(dict(spec))
        assert parse(spec.data) == read(spec.data) == spec


def test_a_later_claim_gets_what_a_new_process_would_give_it_whatever_changed_meanwhile(paths, tmp_path):
    """What claims of the same devices have in common is kept; the node may change between them."""
    renderer = CdiRenderer(paths)
    other = CdiDevice("gpu-1", 1, BDF, extra_nodes=(DeviceNode("/dev/nvidia-caps/nvidia-cap3", 237, 3),))
    changes = (
        lambda: None,
        lambda: put(tmp_path / "proc/devices", DEVICES.replace("510", "235")),
        lambda: stand_in(tmp_path / "dev/nvidia0", 195, 0, gid=44, mode=0o660),
        lambda: put(tmp_path / HOOK, "#!/bin/sh\n", mode=0o755),
        lambda: (tmp_path / "etc/OpenCL/vendors/nvidia.icd").unlink(),
    )
    for number, change in enumerate(changes):
        change()
        for devices in ([GPU], [other], [GPU, other], [GPU]):
            uid = f"{number}f1d2b3c-1111-4222-8333-{len(devices):012d}"
            spec = render(renderer, *devices, uid=uid)
            assert spec.data == render(CdiRenderer(paths), *devices, uid=uid).data
            assert [each["name"] for each in spec["devices"]] == [f"{uid}-{each.name}" for each in devices]


def test_a_uid_that_no_device_may_be_named_by_is_refused_also_when_other_claims_had_the_device(paths):
    renderer = CdiRenderer(paths)
    render(renderer)
    for uid in ('6f1d"', "-6f1d", "6f 1d", ""):
        with pytest.raises(BugError, match="DRA-CDI-INVALID"):
            render(renderer, uid=uid)
    assert render(renderer)["devices"][0]["name"] == f"{UID}-gpu-0"


def test_what_a_claim_adds_is_checked_although_the_rest_was_checked_before(paths):
    renderer = CdiRenderer(paths)
    render(renderer)
    for device in (
        CdiDevice("gpu 0", 0, BDF),
        CdiDevice("gpu-0", 0, BDF, extra_env=("NO_VALUE",)),
        CdiDevice("gpu-0", 0, BDF, extra_mounts=(Mount("relative", "/x", ("ro",)),)),
    ):
        with pytest.raises(BugError, match="DRA-CDI-INVALID"):
            render(renderer, device)


@pytest.mark.parametrize("root", ["/", "/run/nvidia/driver", "/home/kubernetes/bin/nvidia"])
def test_2_every_host_path_exists_on_the_host_and_no_container_path_holds_a_root(tmp_path, root):
    paths = make_node(tmp_path, driver_root=root)
    spec = render(CdiRenderer(paths))
    start(spec, [f"{UID}-gpu-0"], tmp_path)
    for mount in spec["containerEdits"]["mounts"]:
        assert mount["hostPath"].startswith(root)
        assert root == "/" or not mount["containerPath"].startswith(root)
        assert str(tmp_path) not in mount["hostPath"]


def test_2_a_container_whose_plugin_sees_the_driver_elsewhere_gets_the_host_s_spelling(tmp_path):
    view, image = tmp_path / "driver-root", tmp_path / "image"
    install_driver(view)
    put(image / "proc/devices", DEVICES)
    for name in ("nvidiactl", "nvidia-uvm", "nvidia0"):
        put(view / "dev" / name)
    paths = HostPaths(
        driver_root_host="/run/nvidia/driver", driver_root=view, proc=image / "proc", sys=image / "sys",
        dev=image / "dev", cdi_root=image / "cdi", stand_in_nodes=True,
    )  # fmt: skip
    spec = render(CdiRenderer(paths))
    text = encode(spec).decode()
    assert "driver-root" not in text
    assert f"/run/nvidia/driver/{LIB}/libcuda.so.{VERSION}" in text
    (node,) = spec["devices"][0]["containerEdits"]["deviceNodes"]
    assert node["hostPath"] == "/run/nvidia/driver/dev/nvidia0"


def test_3_no_claim_needs_more_than_0_5_whatever_its_uid(paths):
    for uid in (UID, "f" + UID[1:]):
        assert render(CdiRenderer(paths), uid=uid)["cdiVersion"] == "0.5.0"


def test_4_a_major_that_changed_between_two_calls_is_the_new_one(paths, tmp_path):
    renderer = CdiRenderer(paths)
    assert uvm_major(render(renderer)) == 510
    put(tmp_path / "proc/devices", DEVICES.replace("510", "236"))
    assert uvm_major(render(renderer)) == 236


def test_5_a_missing_nvidia_uvm_fails_and_the_retry_after_it_came_succeeds(paths, tmp_path):
    renderer = CdiRenderer(paths)
    (tmp_path / "dev/nvidia-uvm").unlink()
    put(tmp_path / "proc/devices", DEVICES.replace("510 nvidia-uvm\n", ""))
    with pytest.raises(StackError, match="DRA-DEVICE-NODE-MISSING") as caught:
        render(renderer)
    assert caught.value.retryable
    assert not paths.cdi_root.exists()
    put(tmp_path / "proc/devices", DEVICES)
    put(tmp_path / "dev/nvidia-uvm")
    assert uvm_major(render(renderer)) == 510


def test_8_two_claims_in_one_container_resolve_and_no_mount_has_two_sources(paths):
    renderer = CdiRenderer(paths)
    other = "aaaaaaaa-1111-4222-8333-444455556666"
    first, second = render(renderer), render(renderer, CdiDevice("gpu-1", 1, BDF), uid=other)
    names = {device["name"] for spec in (first, second) for device in spec["devices"]}
    assert names == {f"{UID}-gpu-0", f"{other}-gpu-1"}
    assert first["containerEdits"] == second["containerEdits"]
    targets = [mount["containerPath"] for mount in first["containerEdits"]["mounts"]]
    assert len(targets) == len(set(targets))


@pytest.mark.parametrize(
    ("text", "sysfs"), [("00010000:1A:00.0", "10000:1a:00.0"), ("00000001:1A:00.0", "0001:1a:00.0")]
)
def test_10_pci_domains_keep_their_digits_in_links(paths, tmp_path, text, sysfs):
    address = PciAddress.parse(text)
    put(tmp_path / HOOK, "#!/bin/sh\n", mode=0o755)
    (tmp_path / f"sys/bus/pci/devices/{sysfs}/drm/card3").mkdir(parents=True)
    put(tmp_path / "dev/dri/card3")
    spec = render(CdiRenderer(paths), CdiDevice("gpu-0", 0, address))
    (made,) = spec["devices"][0]["containerEdits"]["hooks"]
    assert made["args"][-1] == f"../card3::/dev/dri/by-path/pci-{sysfs}-card"


def test_11_a_link_that_leads_out_of_the_driver_root_is_never_mounted(tmp_path):
    secret = put(tmp_path / f"outside/libnvidia-secret.so.{VERSION}", b"secret")
    root = tmp_path / "host"
    paths = make_node(root)
    for number, target in enumerate(
        (str(secret), f"../../../../outside/{secret.name}", "/proc/self/root/etc/shadow")
    ):
        (root / LIB / f"libnvidia-evil{number}.so.{VERSION}").symlink_to(target)
    assert "evil" not in encode(render(CdiRenderer(paths))).decode()
    assert "secret" not in encode(render(CdiRenderer(paths))).decode()


# -- a node that changes under us --------------------------------------------------------------------------------


def test_a_driver_that_comes_later_is_picked_up(tmp_path):
    paths = make_node(tmp_path, driver=False)
    renderer = CdiRenderer(paths)
    with pytest.raises(StackError, match="DRA-DRIVER-LIBRARIES-MISSING"):
        render(renderer)
    install_driver(tmp_path)
    assert f"libcuda.so.{VERSION}" in encode(render(renderer)).decode()


def test_a_driver_that_was_replaced_gives_its_new_files(paths, tmp_path):
    renderer = CdiRenderer(paths)
    render(renderer)
    for path in (tmp_path / LIB).iterdir():
        path.unlink()
    install_driver_libraries(tmp_path, "590.1.1")
    with pytest.raises(StackError, match="DRA-DRIVER-VERSION-MISMATCH"):
        render(renderer)
    text = encode(render(renderer, version="590.1.1")).decode()
    assert "libcuda.so.590.1.1" in text
    assert VERSION not in text.replace(f"nvidia/{VERSION}", "")


def install_driver_libraries(root, version):
    for stem in ("cuda", "nvidia-ml"):
        library(root / LIB, stem, f"lib{stem}.so.1", version=version)


def test_a_required_library_that_vanished_unseen_fails_and_an_optional_one_is_left_out(paths, tmp_path):
    """Its directory's time stands still, as when a file system is mounted over."""
    renderer = CdiRenderer(paths)
    before = encode(render(renderer)).decode()
    assert "libnvidia-ngx" in before
    stamp = (tmp_path / LIB).stat()
    (tmp_path / LIB / f"libnvidia-ngx.so.{VERSION}").unlink()
    os.utime(tmp_path / LIB, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    after = encode(render(renderer)).decode()
    assert "libnvidia-ngx" not in after
    (tmp_path / LIB / f"libcuda.so.{VERSION}").unlink()
    os.utime(tmp_path / LIB, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(StackError) as caught:
        render(renderer)
    assert f"libcuda.so.{VERSION}" in caught.value.message
    assert caught.value.retryable


def test_a_file_that_moved_unseen_is_found_at_its_new_place(paths, tmp_path):
    put(tmp_path / "usr/sbin/other", b"")
    settle(tmp_path)
    renderer = CdiRenderer(paths)
    render(renderer)
    (tmp_path / "usr/bin/nvidia-smi").rename(tmp_path / "usr/sbin/nvidia-smi")
    settle(tmp_path)
    assert "/usr/sbin/nvidia-smi" in {
        mount["containerPath"] for mount in render(renderer)["containerEdits"]["mounts"]
    }


def test_a_file_that_vanishes_between_the_look_and_the_check_is_left_out_or_fails(
    paths, tmp_path, monkeypatch
):
    renderer = CdiRenderer(paths)
    stale = renderer._catalog.get(VERSION)
    monkeypatch.setattr(renderer._catalog, "get", lambda version: stale)
    (tmp_path / "usr/bin/nvidia-smi").unlink()
    spec = render(renderer)
    assert "/usr/bin/nvidia-smi" not in encode(spec).decode()
    assert "libcuda" in encode(spec).decode()
    (tmp_path / LIB / f"libcuda.so.{VERSION}").unlink()
    with pytest.raises(StackError, match=rf"DRA-DRIVER-FILE-GONE.*libcuda.so.{VERSION}"):
        render(renderer)


@pytest.mark.parametrize("place", [HOOK, "opt/nvidia/toolkit/nvidia-cdi-hook"])
def test_a_hook_program_that_comes_and_goes_changes_the_tier(paths, tmp_path, place):
    renderer = CdiRenderer(paths)
    assert "hooks" not in render(renderer)["containerEdits"]
    program = put(tmp_path / place, "#!/bin/sh\n", mode=0o755)
    assert render(renderer)["containerEdits"]["hooks"][0]["path"] == f"/{place}"
    program.unlink()
    assert "hooks" not in render(renderer)["containerEdits"]


def test_a_hook_path_that_cannot_be_seen_falls_back_and_says_so_once(paths):
    renderer = CdiRenderer(paths, CdiOptions(hook_path="/opt/absent"))
    with structlog.testing.capture_logs() as logs:
        assert "hooks" not in render(renderer)["containerEdits"]
        render(renderer)
    assert [log["path"] for log in logs if log["event"] == "cdi_hook_not_found"] == ["/opt/absent"]


def test_a_hook_that_goes_again_is_said_again(paths, tmp_path):
    renderer = CdiRenderer(paths, CdiOptions(hook_path=f"/{HOOK}"))
    with structlog.testing.capture_logs() as logs:
        render(renderer)
        for _ in range(2):
            program = put(tmp_path / HOOK, "#!/bin/sh\n", mode=0o755)
            assert render(renderer)["containerEdits"]["hooks"]
            program.unlink()
            assert "hooks" not in render(renderer)["containerEdits"]
    assert [log["path"] for log in logs if log["event"] == "cdi_hook_not_found"] == [f"/{HOOK}"] * 3


def test_hooks_that_were_asked_for_must_be_there(paths):
    with pytest.raises(StackError, match="DRA-CDI-HOOK-MISSING"):
        render(CdiRenderer(paths, CdiOptions(exposure="hooks")))


# -- how prepare uses it -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """A device as another room describes it."""

    name: str
    gpu_minor: int
    pci_address: PciAddress
    gpu_uuid: str
    share_id: str | None = None
    admin: bool = False
    mig_instances: tuple[int, int] | None = None
    extra_env: tuple = ()
    extra_mounts: tuple = ()
    vfio: None = None


def test_any_object_that_can_say_what_a_device_is_will_do(paths):
    renderer = CdiRenderer(paths)
    assert render(renderer, Target("gpu-0", 0, BDF, "GPU-x")) == render(renderer)


def test_rendering_twice_gives_the_same_bytes_and_a_written_file_needs_no_second_write(paths):
    renderer = CdiRenderer(paths)
    spec = render(renderer)
    path = renderer.files.write(UID, spec)
    assert encode(render(renderer)) == path.read_bytes()
    assert not renderer.needs_rewrite(path, render(CdiRenderer(paths)))
    path.unlink()
    assert renderer.needs_rewrite(path, spec)


def test_without_nvml_the_driver_on_disk_counts(paths):
    assert f"libcuda.so.{VERSION}" in encode(render(CdiRenderer(paths), version="")).decode()


def test_a_call_looks_at_each_mount_source_once_and_searches_nothing_again(paths, monkeypatch):
    renderer = CdiRenderer(paths, CdiOptions(exposure="soname"))
    render(renderer)
    seen = []
    real = os.lstat
    monkeypatch.setattr(
        os, "lstat", lambda path, *more, **words: seen.append(str(path)) or real(path, *more, **words)
    )
    # Which DRM nodes a GPU has is asked each time.
    listed = os.listdir
    monkeypatch.setattr(
        os, "listdir", lambda path: listed(path) if str(path).endswith("/drm") else pytest.fail(path)
    )
    sources = {mount["hostPath"] for mount in render(renderer)["containerEdits"]["mounts"]}
    monkeypatch.undo()
    looked_at = [path.removeprefix(str(paths.driver_root)) for path in seen]
    assert sorted(path for path in looked_at if path in sources) == sorted(sources)


def test_eight_threads_render_the_same(paths):
    renderer = CdiRenderer(paths)
    expected = encode(render(CdiRenderer(paths)))
    found = []
    start_together = threading.Barrier(8)

    def run():
        start_together.wait()
        found.extend(encode(render(renderer)) for _ in range(5))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 40


@pytest.mark.parametrize(
    ("text", "capabilities"),
    [
        ("", DEFAULT_CAPABILITIES),
        ("all", CAPABILITIES),
        ("compute, utility", {"compute", "utility"}),
        ("display", {"display"}),
    ],
)
def test_capabilities_are_read_as_nvidia_writes_them(text, capabilities):
    assert parse_capabilities(text) == capabilities


def test_a_capability_nobody_knows_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(ConfigError, match=r"DRA-DRIVER-CAPABILITIES.*compat32.*compute, display"):
        parse_capabilities("compute,compat32")


def test_what_a_spec_names_and_is_gone_is_told_as_the_host_spells_it(paths):
    renderer = CdiRenderer(paths, CdiOptions(exposure="soname"))
    spec = render(renderer)
    assert renderer.missing_files(spec) == []
    mount = next(m["hostPath"] for m in spec["containerEdits"]["mounts"] if "libcuda.so" in m["hostPath"])
    paths.view_of(mount).unlink()
    (paths.dev / "nvidia0").unlink()
    assert renderer.missing_files(spec) == ["/dev/nvidia0", mount]
