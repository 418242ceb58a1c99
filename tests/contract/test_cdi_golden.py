"""Our specs give a container what the reference generator's give it, on the same node, in every tier.

The recordings are in `tests/data/cdi`; DRA_GOLDEN names another directory that has `cdi/`.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import pytest

from dra.cdi.mig_nodes import mig_capability_nodes
from dra.cdi.model import CdiDevice, CdiOptions
from dra.cdi.renderer import CdiRenderer
from dra.cdi.spec import check, encode, minimum_version
from dra.host.driver_lists import CAPABILITIES
from dra.host.elf import read_elf
from dra.host.paths import HostPaths
from dra.sim.tree.golden import materialise_golden_tree
from dra.sim.tree.nodes import can_make_nodes
from dra.values import PciAddress
from tests.contract.cdi_container import LOADER_DIRS, start
from tests.yaml_text import read

GOLDEN = Path(os.environ.get("DRA_GOLDEN") or Path(__file__).parent.parent / "data") / "cdi"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no recorded CDI specs at {GOLDEN}")

UID = "6f1d2b3c-1111-4222-8333-444455556666"
VERSION = "580.95.05"
HOOK = "/usr/bin/nvidia-cdi-hook"
TIERS = ("hooks", "soname", "ld-library-path")
OPERATOR = "/run/nvidia/driver"
# Only an X server needs these; a container gets them by --driver-capabilities.
X11 = ("/nvidia/xorg/", "/X11/xorg.conf.d/")

H100_BDF = ("1a", "1b", "4a", "4b", "8a", "8b", "ca", "cb")


def whole(minor, bus="00"):
    return CdiDevice(f"gpu-{minor}", minor, PciAddress.parse(f"0000:{bus}:00.0"))


# golden -> (tree, driver root at the host, [(golden device, our device)])
CASES = {
    "a100-headless": ("a100-headless", "/", [(str(n), whole(n)) for n in (0, 3, 7)]),
    "h100-drm-nogids": ("h100", "/", [(str(n), whole(n, H100_BDF[n])) for n in (0, 1, 7)]),
    "h100-dra-host-operator": ("h100", OPERATOR, [(f"GPU-01000100-0000-0000-0000-00000000000{n}", whole(n, H100_BDF[n]))
                                                  for n in (0, 5)]),
    "ldcache": ("ldcache", "/", [("GPU-12345678-1234-1234-1234-123456780000", whole(0))]),
    "a100-mig": ("a100-mig", "/", [("1", whole(1))]),
}  # fmt: skip


@cache
def recorded(name):
    return read((GOLDEN / f"{name}.yaml").read_text())


@pytest.fixture(scope="module", params=["real nodes", "stand-ins"])
def build(request, tmp_path_factory):
    """Make the node of a case once for all its tests; give its paths."""
    real = request.param == "real nodes"
    if real and not can_make_nodes():
        pytest.skip("this process may not make device nodes")
    made = {}

    def build(case):
        tree, driver_root, _ = CASES[case]
        if case not in made:
            root = tmp_path_factory.mktemp("node")
            recording = json.loads((GOLDEN / f"{tree}.tree.json").read_text())
            materialise_golden_tree(recording, root, driver_root=driver_root, real_nodes=real)
            hook = root / HOOK.lstrip("/")
            hook.parent.mkdir(parents=True, exist_ok=True)
            hook.write_text("#!/bin/sh\n")
            hook.chmod(0o755)
            made[case] = HostPaths(host_root=root, driver_root_host=driver_root, stand_in_nodes=not real)
        return made[case]

    return build


def both(build, case, tier, **options):
    """Give, for each device of a case, the containers that the recorded spec and ours make."""
    paths = build(case)
    devices = CASES[case][2]
    renderer = CdiRenderer(paths, CdiOptions(exposure=tier, **options))
    spec = renderer.render(UID, [device for _, device in devices], driver_version=VERSION)
    check(spec)
    golden = recorded(case)
    for theirs, ours in devices:
        yield (
            start(golden, [theirs], paths.host_root),
            start(spec, [f"{UID}-{ours.name}"], paths.host_root),
        )


def is_library(path):
    return ".so" in path.rpartition("/")[2]


def is_x11(path):
    return any(part in path for part in X11)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", CASES)
def test_a_container_gets_the_same_device_nodes(build, case, tier):
    for golden, ours in both(build, case, tier):
        assert ours.nodes == golden.nodes


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", CASES)
def test_a_container_gets_the_same_programs_firmware_sockets_and_configuration(build, case, tier):
    for golden, ours in both(build, case, tier):
        wanted = {
            path: file for path, file in golden.files.items() if not is_library(path) and not is_x11(path)
        }
        assert {path: file for path, file in ours.files.items() if not is_library(path)} == wanted
        for path in wanted:
            assert set(ours.options[path]) == set(golden.options[path])


@pytest.mark.parametrize("case", CASES)
def test_with_hooks_libraries_stand_at_the_same_places(build, case):
    for golden, ours in both(build, case, "hooks"):
        wanted = {path: file for path, file in golden.files.items() if is_library(path) and not is_x11(path)}
        assert {path: file for path, file in ours.files.items() if is_library(path)} == wanted
        assert set(golden.cache_dirs) == set(ours.cache_dirs)


@pytest.mark.parametrize("case", CASES)
def test_with_hooks_every_link_of_the_reference_leads_to_the_same_file(build, case):
    for golden, ours in both(build, case, "hooks"):
        links = {link for link in golden.links if "by-path" not in link and not is_x11(link)}
        assert links
        assert {link: ours.open(link) for link in links} == {link: golden.open(link) for link in links}


@pytest.mark.parametrize("image", LOADER_DIRS)
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", CASES)
def test_every_library_is_loaded_by_its_soname_its_file_name_and_the_names_the_host_has(
    build, case, tier, image
):
    for golden, ours in both(build, case, tier):
        libraries = {
            path: file for path, file in golden.files.items() if is_library(path) and not is_x11(path)
        }
        names = {path.rpartition("/")[2]: file for path, file in libraries.items()}
        names |= {
            facts.soname: file
            for file in libraries.values()
            if (facts := read_elf(str(file))) and facts.soname
        }
        links = {
            link: golden.open(link) for link in golden.links if "by-path" not in link and not is_x11(link)
        }
        names |= {link.rpartition("/")[2]: file for link, file in links.items() if "/gbm/" not in link}
        # VDPAU's driver is opened by path, below the library directory, except where LD_LIBRARY_PATH names it.
        beside = {name: file for name, file in names.items() if "vdpau" in name and tier == "soname"}
        plain = {name: file for name, file in names.items() if name not in beside}
        assert len(plain) > 30
        assert {name: ours.load(name, image) for name in plain} == plain
        for directory in LOADER_DIRS[image]:
            opened = {name: ours.open(f"{directory}/vdpau/{name}") for name in beside}
            if opened == beside:
                break
        else:
            assert not beside


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", CASES)
def test_the_gbm_back_end_is_the_allocator(build, case, tier):
    for golden, ours in both(build, case, tier):
        (link,) = [link for link in golden.links if "/gbm/" in link]
        directory = {
            "hooks": link.rpartition("/gbm/")[0],
            "soname": "/usr/lib/x86_64-linux-gnu",
            "ld-library-path": "/usr/local/nvidia/lib64",
        }[tier]
        assert ours.open(f"{directory}/gbm/nvidia-drm_gbm.so") == golden.open(link) is not None


def test_render_nodes_are_linked_by_pci_path_without_the_driver_root(build):
    for case in ("h100-drm-nogids", "h100-dra-host-operator"):
        for golden, ours in both(build, case, "hooks"):
            wanted = {
                link.removeprefix("/driver-root"): target
                for link, target in golden.links.items()
                if "by-path" in link
            }
            assert len(wanted) == 2
            assert {link: target for link, target in ours.links.items() if "by-path" in link} == wanted


@pytest.mark.parametrize("case", ["h100-drm-nogids", "h100-dra-host-operator"])
def test_all_capabilities_give_x11_files_and_the_hooks_that_go_with_them(build, case):
    for golden, ours in both(build, case, "hooks", capabilities=CAPABILITIES):
        x11 = {path: file for path, file in golden.files.items() if is_x11(path)}
        assert len(x11) == 3
        assert {path: ours.files.get(path) for path in x11} == x11
        commands = {hook[0] for hook in ours.hooks}
        assert {hook[0] for hook in golden.hooks} <= commands
        assert "chmod" in commands


@pytest.mark.parametrize("case", CASES)
def test_the_hooks_are_the_reference_s_without_the_one_that_breaks_read_only_containers(build, case):
    for golden, ours in both(build, case, "hooks"):
        commands = dict.fromkeys(hook[0] for hook in ours.hooks)
        assert list(commands) == [
            "create-symlinks", "enable-cuda-compat", "update-ldcache", "disable-device-node-modification"
        ]  # fmt: skip
        assert set(commands) == {hook[0] for hook in golden.hooks} - {"update-application-profile"}
        compat = [hook for hook in golden.hooks if hook[0] == "enable-cuda-compat"]
        assert [hook for hook in ours.hooks if hook[0] == "enable-cuda-compat"] == compat


@pytest.mark.parametrize("tier", ["soname", "ld-library-path"])
@pytest.mark.parametrize("case", CASES)
def test_without_hooks_nothing_needs_a_hook(build, case, tier):
    for golden, ours in both(build, case, tier):
        assert ours.hooks == []
        assert ours.env["NVIDIA_VISIBLE_DEVICES"] == golden.env["NVIDIA_VISIBLE_DEVICES"] == "void"


@pytest.mark.parametrize(("instance", "golden_device"), [((7, 0), "0:0"), ((8, 0), "0:1"), ((2, 0), "0:2")])
def test_a_mig_device_gets_its_two_capability_nodes_even_where_the_host_has_none(
    build, instance, golden_device
):
    paths = build("a100-mig")
    extra = mig_capability_nodes(paths, gpu_minor=0, gpu_instance=instance[0], compute_instance=instance[1])
    device = CdiDevice("gpu-0-mig-1g5gb-19-0", 0, PciAddress.parse("0000:07:00.0"), extra_nodes=extra)
    spec = CdiRenderer(paths, CdiOptions(exposure="soname")).render(UID, [device], driver_version=VERSION)
    ours = start(spec, [f"{UID}-{device.name}"], paths.host_root)
    assert ours.nodes == start(recorded("a100-mig"), [golden_device], paths.host_root).nodes


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", CASES)
def test_no_path_of_the_container_holds_a_root_and_every_host_path_exists(build, case, tier):
    paths = build(case)
    spec = CdiRenderer(paths, CdiOptions(exposure=tier)).render(
        UID, [CASES[case][2][0][1]], driver_version=VERSION
    )
    text = encode(spec).decode()
    assert str(paths.host_root) not in text
    edits = [spec["containerEdits"], *(device["containerEdits"] for device in spec["devices"])]
    for edit in edits:
        for mount in edit.get("mounts", []):
            assert OPERATOR not in mount["containerPath"]
            assert (paths.host_root / mount["hostPath"].lstrip("/")).exists()
        for node in edit["deviceNodes"]:
            assert OPERATOR not in node["path"]
            host = node.get("hostPath", node["path"])
            assert host == (node["path"] if CASES[case][1] == "/" else OPERATOR + node["path"])
            assert (paths.host_root / host.lstrip("/")).exists()
        for hook in edit.get("hooks", []):
            assert OPERATOR not in " ".join(hook["args"])


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("case", CASES)
def test_engines_of_2023_can_read_it(build, case, tier):
    paths = build(case)
    spec = CdiRenderer(paths, CdiOptions(exposure=tier)).render(
        UID, [CASES[case][2][0][1]], driver_version=VERSION
    )
    assert spec["cdiVersion"] == "0.5.0"
    assert "additionalGids" not in encode(spec).decode()
    assert read(encode(spec)) == json.loads(encode(spec)) == spec


@pytest.mark.parametrize("name", CASES)
def test_the_version_rule_gives_what_the_reference_generator_wrote(name):
    assert minimum_version(recorded(name)) == recorded(name)["cdiVersion"]
