import _ctypes
import os
import shutil
from pathlib import Path

import pytest

from dra.errors import StackError
from dra.nvml.library import InjectedLibrary, RootedLibrary, find_library, load_library
from dra.sim.tree.ldcache import ld_so_cache

A_LIBRARY = Path(_ctypes.__file__)


def put(root, inside, *, content=None):
    path = root / inside.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        shutil.copyfile(A_LIBRARY, path)
    else:
        path.write_bytes(content)
    return path


def link(root, inside, target):
    path = root / inside.lstrip("/")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def code_of(*roots):
    with pytest.raises(StackError) as caught:
        find_library(roots)
    return caught.value


@pytest.mark.parametrize(
    "inside",
    [
        "/usr/lib64/libnvidia-ml.so.1",
        "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
        "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1",
        "/lib64/libnvidia-ml.so.1",
        "/libnvidia-ml.so.1",
    ],
)
def test_the_library_is_found_where_distributions_and_gke_put_it(tmp_path, inside):
    put(tmp_path, inside)
    assert find_library([tmp_path]).inside == inside


def test_a_link_is_followed_inside_the_root_as_a_process_in_it_would(tmp_path):
    root = tmp_path / "driver-root"
    real = put(root, "/opt/nvidia/libnvidia-ml.so.580.95.05")
    link(root, "/usr/lib64/libnvidia-ml.so.1", "/opt/nvidia/libnvidia-ml.so.580.95.05")
    assert find_library([root]).real == real


def test_a_link_that_points_out_of_the_root_finds_nothing_outside(tmp_path):
    outside = put(tmp_path, "/outside/libnvidia-ml.so.1")
    root = tmp_path / "driver-root"
    link(root, "/usr/lib64/libnvidia-ml.so.1", str(outside))
    link(root, "/lib64/libnvidia-ml.so.1", "../../outside/libnvidia-ml.so.1")
    assert code_of(root).code == "DRA-NVML-LIBRARY-NOT-FOUND"


def test_a_library_known_to_the_linker_cache_alone_is_found(tmp_path):
    put(tmp_path, "/srv/odd place/libnvidia-ml.so.1")
    cache = ld_so_cache(
        [("libz.so.1", "/x/libz.so.1"), ("libnvidia-ml.so.1", "/srv/odd place/libnvidia-ml.so.1")]
    )
    put(tmp_path, "/etc/ld.so.cache", content=cache)
    assert find_library([tmp_path]).inside == "/srv/odd place/libnvidia-ml.so.1"


def test_a_torn_linker_cache_says_nothing(tmp_path):
    put(tmp_path, "/srv/libnvidia-ml.so.1")
    cache = ld_so_cache([("libnvidia-ml.so.1", "/srv/libnvidia-ml.so.1")])
    put(tmp_path, "/etc/ld.so.cache", content=cache[:-10])
    assert code_of(tmp_path).code == "DRA-NVML-LIBRARY-NOT-FOUND"


def test_a_32_bit_library_is_passed_over_for_the_right_one(tmp_path):
    header = bytearray(A_LIBRARY.read_bytes()[:64])
    header[4] = 1
    put(tmp_path, "/usr/lib64/libnvidia-ml.so.1", content=bytes(header))
    error = code_of(tmp_path)
    assert error.code == "DRA-NVML-LIBRARY-BAD"
    assert "32-bit" in error.message
    put(tmp_path, "/lib64/libnvidia-ml.so.1")
    assert find_library([tmp_path]).inside == "/lib64/libnvidia-ml.so.1"


def test_a_library_for_another_processor_and_a_cut_off_file_are_told_apart(tmp_path):
    header = bytearray(A_LIBRARY.read_bytes()[:64])
    header[18:20] = (0xF7).to_bytes(2, "little")
    put(tmp_path, "/usr/lib64/libnvidia-ml.so.1", content=bytes(header))
    put(tmp_path, "/lib64/libnvidia-ml.so.1", content=b"")
    message = code_of(tmp_path).message
    assert "another processor" in message
    assert "not an ELF file" in message


def test_the_error_says_everything_that_was_searched(tmp_path):
    (tmp_path / "etc").mkdir()
    error = code_of(tmp_path)
    assert error.code == "DRA-NVML-LIBRARY-NOT-FOUND"
    for place in ("/usr/lib64", "/usr/lib/aarch64-linux-gnu", "ld.so.cache", str(tmp_path)):
        assert place in error.message
    assert error.retryable


def test_a_root_that_is_empty_or_missing_is_said_to_be_so(tmp_path):
    assert "is empty" in code_of(tmp_path).message
    assert code_of(tmp_path / "run/nvidia/driver").code == "DRA-NVML-ROOT-MISSING"


def test_wsl_and_tegra_are_refused_by_name(tmp_path):
    wsl, tegra = tmp_path / "wsl", tmp_path / "tegra"
    put(wsl, "/usr/lib/wsl/lib/libnvidia-ml.so.1")
    put(tegra, "/etc/nv_tegra_release", content=b"# R36")
    for root, code in ((wsl, "DRA-NVML-WSL"), (tegra, "DRA-NVML-TEGRA")):
        error = code_of(root)
        assert error.code == code
        assert not error.retryable


def test_an_operator_root_that_appears_later_is_found_without_a_restart(tmp_path):
    late = tmp_path / "run/nvidia/driver"
    source = RootedLibrary([late])
    with pytest.raises(StackError):
        source.fingerprint()
    put(late, "/usr/lib64/libnvidia-ml.so.1")
    first = source.fingerprint()
    assert source.fingerprint() == first
    assert source.load() is not None


def test_of_several_roots_the_first_with_a_library_wins(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    put(two, "/lib64/libnvidia-ml.so.1")
    assert find_library([one, two]).real == two / "lib64/libnvidia-ml.so.1"


def test_a_replaced_file_is_loaded_anew_under_the_same_path(tmp_path):
    path = put(tmp_path, "/usr/lib64/libnvidia-ml.so.1")
    before = find_library([tmp_path])
    old = load_library(before)
    assert load_library(before)._handle == old._handle
    fresh = tmp_path / "fresh"
    shutil.copyfile(A_LIBRARY, fresh)
    os.replace(fresh, path)
    after = find_library([tmp_path])
    assert after != before
    assert load_library(after)._handle != old._handle


def test_a_file_the_loader_refuses_is_an_error_of_the_stack(tmp_path):
    put(tmp_path, "/usr/lib64/libnvidia-ml.so.1", content=A_LIBRARY.read_bytes()[:100])
    with pytest.raises(StackError) as caught:
        RootedLibrary([tmp_path]).load()
    assert caught.value.code == "DRA-NVML-LIBRARY-BAD"


def test_an_injected_library_counts_as_replaced_when_it_is_another_object():
    objects = [object(), object()]
    now = [objects[0]]
    source = InjectedLibrary(lambda: now[0])
    first = source.fingerprint()
    assert source.fingerprint() == first
    now[0] = objects[1]
    assert source.fingerprint() != first
    assert source.load() is objects[1]
