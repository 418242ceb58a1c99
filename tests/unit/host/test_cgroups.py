"""Which pod a process belongs to, from the forms that kubelets and runtimes give their cgroups."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dra.host.cgroups import Place, command_of, parse_cgroup, place_of
from dra.host.paths import HostPaths

UID = "0f6bb5a9-1c2d-4e3f-8a9b-0123456789ab"
LOW = UID.replace("-", "_")
ID = "c" * 64


@pytest.mark.parametrize(
    "text",
    [
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{LOW}.slice/cri-containerd-{ID}.scope",
        f"0::/kubepods.slice/kubepods-pod{LOW}.slice/crio-{ID}.scope/container",
        f"0::/kubepods/besteffort/pod{UID}/{ID}",
        f"12:devices:/kubepods/pod{UID}/{ID}\n1:name=systemd:/kubepods/pod{UID}/{ID}\n",
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{LOW}.slice/cri-containerd-{ID}.scope",
        f"0::/../../kubepods-burstable-pod{LOW}.slice/cri-containerd-{ID}.scope",
    ],
)
def test_a_pods_process_is_known_by_its_pods_uid(text):
    assert parse_cgroup(text) == Place(UID, ID)


def test_static_pods_have_uids_without_dashes():
    assert parse_cgroup(f"0::/kubepods/pod{'ab' * 16}/{ID}").pod_uid == "ab" * 16


@pytest.mark.parametrize(
    "text", ["0::/system.slice/sshd.service", "", "0::/", "0::/kubepods.slice", "0::/kubepods/podx"]
)
def test_other_processes_are_the_hosts(text):
    assert parse_cgroup(text) == Place()


@given(st.text(max_size=200))
def test_no_text_is_too_much(text):
    assert isinstance(parse_cgroup(text), Place)


def test_what_cannot_be_seen_is_not_known(tmp_path):
    paths = HostPaths(host_root=tmp_path)
    assert place_of(paths, 7) is None
    assert command_of(paths, 7) == ""
    folder = tmp_path / "proc/7"
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(f"0::/kubepods/pod{UID}/{ID}\n")
    (folder / "comm").write_text("python3\n")
    assert place_of(paths, 7) == Place(UID, ID)
    assert command_of(paths, 7) == "python3"
