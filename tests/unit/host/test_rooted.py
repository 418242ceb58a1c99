"""A path in a driver root means what it means to a process that lives there."""

from pathlib import Path

import pytest

from dra.host.rooted import resolve, resolve_inside


@pytest.fixture
def root(tmp_path):
    (tmp_path / "outside").write_text("secret")
    root = tmp_path / "root"
    (root / "usr/lib/x").mkdir(parents=True)
    (root / "usr/lib/real.so").touch()
    return root


def test_an_absolute_link_stays_in_the_root(root):
    (root / "lib").symlink_to("/usr/lib")
    assert resolve(root, "/lib/real.so") == root / "usr/lib/real.so"


def test_a_link_cannot_lead_out_of_the_root(root):
    (root / "usr/lib/up.so").symlink_to("../../../../../outside")
    (root / "usr/lib/abs.so").symlink_to(str(root.parent / "outside"))
    assert resolve(root, "/usr/lib/up.so") is None
    assert resolve(root, "/usr/lib/abs.so") is None
    (root / "outside").touch()
    assert resolve(root, "/usr/lib/up.so") == root / "outside"


def test_dots_in_the_path_end_at_the_root(root):
    assert resolve(root, "/../../usr/./lib/x/../real.so") == root / "usr/lib/real.so"
    assert resolve(root, "..") == root


def test_a_chain_of_links_ends_at_the_file(root):
    (root / "usr/lib/a.so").symlink_to("b.so")
    (root / "usr/lib/b.so").symlink_to("/usr/lib/x/../real.so")
    assert resolve_inside(str(root), "/usr/lib/a.so") == "/usr/lib/real.so"


def test_loops_and_dangling_links_are_nothing(root):
    (root / "one").symlink_to("two")
    (root / "two").symlink_to("one")
    (root / "dangling").symlink_to("/nowhere")
    (root / "self").symlink_to("self/self")
    for name in ("one", "dangling", "self", "absent", "usr/lib/real.so/below"):
        assert resolve(root, name) is None


def test_the_host_itself_can_be_the_root(tmp_path):
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").touch()
    assert resolve(Path("/"), str(tmp_path / "link")) == tmp_path / "file"
