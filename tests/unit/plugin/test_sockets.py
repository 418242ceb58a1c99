"""Names of socket files, and which of them may be removed."""

from __future__ import annotations

import base64
import hashlib
import socket
from pathlib import Path

import pytest

from dra.errors import ConfigError
from dra.plugin.sockets import (
    find_sockets_of,
    hidden_path,
    inode_of,
    plan_sockets,
    refuses,
    remove_stale,
    unlink_own,
)

UID = "0a1b2c3d-0000-4000-8000-0123456789ab"
PLUGINS = Path("/var/lib/kubelet/plugins")
REGISTRY = Path("/var/lib/kubelet/plugins_registry")


def plan(driver="gpu.nvidia.com", *, pod_uid=UID, root="/var/lib/kubelet"):
    return plan_sockets(
        driver,
        plugins_dir=Path(root, "plugins"),
        registry_dir=Path(root, "plugins_registry"),
        pod_uid=pod_uid,
    )


def listener(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen(1)
    return server


def dead(path: Path) -> Path:
    listener(path).close()
    return path


def no_sleep(_seconds):
    pass


def test_with_a_pod_uid_both_names_hold_it():
    sockets = plan()
    assert sockets.service == PLUGINS / "gpu.nvidia.com" / f"dra.{UID}.sock"
    assert sockets.registration == REGISTRY / f"gpu.nvidia.com-{UID}-reg.sock"


def test_without_a_pod_uid_the_names_are_the_plain_ones():
    sockets = plan(pod_uid="")
    assert sockets.service == PLUGINS / "gpu.nvidia.com" / "dra.sock"
    assert sockets.registration == REGISTRY / "gpu.nvidia.com-reg.sock"


def test_a_name_that_does_not_fit_hashes_the_pod_uid():
    sockets = plan(root="/var/lib/" + "k" * 24)
    short = base64.urlsafe_b64encode(hashlib.sha256(UID.encode()).digest()[:8]).decode().rstrip("=")
    assert sockets.registration.name == f"gpu.nvidia.com-{short}-reg.sock"
    assert sockets.service.name == f"dra.{UID}.sock"


def test_a_long_driver_name_hashes_driver_and_pod_uid():
    driver = "gpu." + "d" * 45 + ".example.com"
    sockets = plan(driver)
    both = (
        base64.urlsafe_b64encode(hashlib.sha256(f"{driver}\0{UID}".encode()).digest()[:16])
        .decode()
        .rstrip("=")
    )
    assert sockets.registration.name == f"dra-{both}-reg.sock"
    assert all(len(str(path)) <= 107 for path in (sockets.service, sockets.registration))


@pytest.mark.parametrize("length", range(20, 100, 3))
@pytest.mark.parametrize("pod_uid", ["", UID])
def test_a_planned_path_can_always_be_bound_or_is_refused_with_a_code(length, pod_uid):
    root = "/" + "r" * length
    try:
        sockets = plan(pod_uid=pod_uid, root=root)
    except ConfigError as error:
        assert error.code == "DRA-SOCKET-PATH-TOO-LONG"
        assert root in error.message
        assert error.remedy
        return
    for path in (sockets.service, sockets.registration):
        assert len(str(path)) <= 107
        assert len(str(hidden_path(path, "gpu.nvidia.com"))) <= 107


def test_two_pods_never_get_the_same_names():
    other = UID[:-1] + "c"
    for root in ("/var/lib/kubelet", "/var/lib/" + "k" * 24):
        first, second = plan(root=root), plan(root=root, pod_uid=other)
        assert first.service != second.service
        assert first.registration != second.registration


def test_a_dead_socket_is_removed_and_a_living_one_stays(short_dir):
    gone, alive = dead(short_dir / "a.sock"), short_dir / "b.sock"
    with listener(alive):
        assert remove_stale([gone, alive], sleep=no_sleep) == [gone]
    assert not gone.exists()
    assert alive.exists()


def test_a_socket_that_starts_to_listen_between_two_looks_stays(short_dir):
    path = short_dir / "a.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        assert refuses(path)
        assert remove_stale([path], sleep=lambda _seconds: server.listen(1)) == []
    assert path.exists()


def test_a_file_that_is_replaced_between_two_looks_stays(short_dir):
    path = dead(short_dir / "a.sock")
    anchor = short_dir / "anchor"
    path.rename(anchor)
    dead(path)

    def replace(_seconds):
        path.unlink()
        anchor.rename(path)

    assert remove_stale([path], sleep=replace) == []
    assert path.exists()


def test_a_server_whose_backlog_is_full_is_not_dead(short_dir):
    path = short_dir / "a.sock"
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    clients = []
    with server:
        server.bind(str(path))
        server.listen(0)
        for _ in range(4):
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            client.setblocking(False)
            clients.append(client)
            try:
                client.connect(str(path))
            except BlockingIOError:
                break
        else:
            pytest.fail("the backlog never filled")
        assert not refuses(path)
    for client in clients:
        client.close()


def test_a_regular_file_is_never_removed(short_dir):
    path = short_dir / "gpu.nvidia.com-reg.sock"
    path.write_text("notes")
    assert remove_stale([path], sleep=no_sleep) == []
    assert path.read_text() == "notes"


def test_only_the_owners_inode_is_unlinked(short_dir):
    path = short_dir / "a.sock"
    with listener(path) as _mine:
        mine = inode_of(path)
        path.rename(short_dir / "kept")  # so that the inode cannot be used again
        with listener(path) as _theirs:
            assert not unlink_own(path, mine)
            assert path.exists()
            assert unlink_own(path, inode_of(path))
    assert not path.exists()
    assert not unlink_own(path, None)


def test_sockets_of_other_drivers_are_not_ours(short_dir):
    registry, plugins = short_dir / "registry", short_dir / "plugins"
    registry.mkdir()
    (plugins / "gpu.nvidia.com").mkdir(parents=True)
    (plugins / "gpu.nvidia.com" / "claims").mkdir()
    ours = {
        registry / "gpu.nvidia.com-reg.sock",
        registry / f"gpu.nvidia.com-{UID}-reg.sock",
        hidden_path(registry / "x", "gpu.nvidia.com"),
        plugins / "gpu.nvidia.com" / "dra.sock",
        plugins / "gpu.nvidia.com" / f"dra.{UID}.sock",
        plugins / "gpu.nvidia.com" / f"dra-{UID}.sock",
        hidden_path(plugins / "gpu.nvidia.com" / "x", "gpu.nvidia.com"),
    }
    others = {
        registry / "gpu.nvidia.com.example-reg.sock",
        registry / "compute-domain.nvidia.com-reg.sock",
        registry / "gpuXnvidiaXcom-reg.sock",
        registry / "dra-AAAAAAAAAAAAAAAAAAAAAA-reg.sock",
        hidden_path(registry / "x", "compute-domain.nvidia.com"),
    }
    for path in ours | others:
        dead(path)
    assert set(find_sockets_of("gpu.nvidia.com", plugins_dir=plugins, registry_dir=registry)) == ours


def test_missing_directories_hold_no_sockets(short_dir):
    assert find_sockets_of("d", plugins_dir=short_dir / "no", registry_dir=short_dir / "none") == []
