"""Where `dra sim up` finds the DeviceClasses."""

from __future__ import annotations

from pathlib import Path

import pytest

from dra.cli.main import main

CHECKOUT = Path(__file__).parents[3]


@pytest.fixture
def started(monkeypatch):
    """Note what would be started; nothing is."""
    found = []
    monkeypatch.setattr("dra.sim.up.run_up", lambda settings, say: found.append(settings.manifests))
    monkeypatch.setattr("dra.sim.up.start_detached", lambda root, words: found.append(words))
    return found


@pytest.mark.parametrize("where", ["elsewhere", "checkout"])
def test_it_is_the_checkouts_wherever_the_user_stands(started, tmp_path, monkeypatch, where):
    monkeypatch.chdir(CHECKOUT if where == "checkout" else tmp_path)
    root = ["--nodes", "t4-x1", "--root", str(tmp_path / "r")]
    assert main(["sim", "up", *root]) == 0
    assert main(["sim", "up", "--detach", *root]) == 0
    file = CHECKOUT / "deploy/manifests/deviceclasses.yaml"
    assert started[0] == file
    assert str(file.parent) in started[1]


def test_a_folder_without_them_is_an_error_before_anything_starts(started, tmp_path, capsys):
    nowhere = tmp_path / "nowhere"
    for detach in ([], ["--detach"]):
        words = ["--nodes", "t4-x1", "--root", str(tmp_path / "r"), "--manifests", str(nowhere)]
        assert main(["sim", "up", *detach, *words]) == 2
        text = capsys.readouterr().err
        assert "DRA-SIM-MANIFESTS" in text and str(nowhere) in text
    assert started == []
    assert not (tmp_path / "r").exists()


def test_without_a_checkout_it_is_said(started, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dra.cli.sim._of_checkout", Path)
    assert main(["sim", "up", "--detach", "--nodes", "t4-x1", "--root", str(tmp_path / "r")]) == 0
    assert "without DeviceClasses" in capsys.readouterr().err
    assert "--manifests" not in started[0]
