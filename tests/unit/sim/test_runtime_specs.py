"""CDI files are read as strictly as container engines read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dra.sim.runtime import SpecCache, SpecError, UnresolvableError, parse_spec


def spec(**changes):
    base = {
        "cdiVersion": "0.5.0",
        "kind": "k8s.gpu.nvidia.com/claim",
        "devices": [{"name": "1-gpu-0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
    }
    return {key: value for key, value in {**base, **changes}.items() if value is not None}


def parse(data, **options):
    text = data if isinstance(data, str) else json.dumps(data)
    return parse_spec(text, Path("a.yaml"), **options)


def with_edits(**edits):
    return spec(containerEdits=edits)


def test_a_plain_spec_is_read():
    parsed = parse(spec())
    assert parsed.kind == "k8s.gpu.nvidia.com/claim"
    assert set(parsed.devices) == {"1-gpu-0"}


def test_yaml_is_read_as_well():
    text = "---\ncdiVersion: v0.5.0\nkind: a.b/cc\ndevices:\n- name: x\n  containerEdits:\n    env: [A=1]\n"
    assert parse(text).version == "0.5.0"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("", "empty"),
        ("{", "neither JSON nor YAML"),
        ('{"cdiVersion": "0.5.0", "cdiVersion": "0.5.0"}', "twice"),
        ("[]", "must be an object"),
        (spec(extra=1), "unknown field 'extra'"),
        (spec(cdiVersion="0.5"), "unknown CDI version"),
        (spec(cdiVersion="0.2.0"), "unknown CDI version"),
        (spec(cdiVersion=None), "cdiVersion is missing"),
        (spec(cdiVersion=0.5), "must be a string"),
        (spec(kind="nvidia.com"), "invalid kind"),
        (spec(kind="nvidia.com/"), "invalid kind"),
        (spec(kind="1nvidia.com/gpu"), "invalid kind"),
        (spec(devices=[]), "at least one device"),
        (spec(devices=[{"name": "a/b", "containerEdits": {"env": ["A=1"]}}]), "invalid device name"),
        (spec(devices=[{"name": "-a", "containerEdits": {"env": ["A=1"]}}]), "invalid device name"),
        (spec(devices=[{"name": "a", "containerEdits": {}}]), "has no edits"),
        (spec(devices=[{"name": "a", "containerEdits": {"env": []}}]), "has no edits"),
        (spec(devices=[{"name": "a"}]), "containerEdits is missing"),
        (spec(devices=[{"name": "a", "containerEdits": {"env": ["A=1"]}}] * 2), "defined twice"),
        (with_edits(env=["=1"]), "NAME=VALUE"),
        (with_edits(env=["A"]), "NAME=VALUE"),
        (with_edits(deviceNodes=[{"hostPath": "/dev/a"}]), "path is missing"),
        (with_edits(deviceNodes=[{"path": ""}]), "must not be empty"),
        (with_edits(deviceNodes=[{"path": "/a", "fileMode": "0666"}]), "must be an integer"),
        (with_edits(deviceNodes=[{"path": "/a", "fileMode": 0o100666}]), "permissions"),
        (with_edits(deviceNodes=[{"path": "/a", "permissions": "none"}]), "other letters"),
        (with_edits(deviceNodes=[{"path": "/a", "type": "d"}]), "none of"),
        (with_edits(mounts=[{"hostPath": "/a"}]), "containerPath is missing"),
        (with_edits(mounts=[{"hostPath": "/a", "containerPath": "/a", "readOnly": True}]), "unknown field"),
        (with_edits(hooks=[{"hookName": "createContainer"}]), "path is missing"),
        (with_edits(hooks=[{"hookName": "create", "path": "/h"}]), "none of"),
        (with_edits(additionalGIDs=[1]), "unknown field"),
    ],
)
def test_an_invalid_file_is_refused_with_the_reason(data, why):
    with pytest.raises(SpecError, match=why):
        parse(data)


@pytest.mark.parametrize(
    ("data", "needed"),
    [
        (spec(), "0.5.0"),
        (spec(devices=[{"name": "a", "containerEdits": {"env": ["A=1"]}}]), "0.3.0"),
        (with_edits(mounts=[{"hostPath": "/a", "containerPath": "/a", "type": "bind"}]), "0.5.0"),
        (spec(annotations={"a.b/c": "d"}), "0.6.0"),
        (spec(kind="a.b/cc.dd"), "0.6.0"),
        (with_edits(additionalGids=[44]), "0.7.0"),
        (with_edits(netDevices=[{"hostInterfaceName": "a", "name": "b"}]), "1.1.0"),
        (with_edits(intelRdt={"schemata": ["x"]}), "1.1.0"),
        (with_edits(intelRdt={"closID": "x"}), "0.7.0"),
    ],
)
def test_the_version_must_allow_what_the_file_uses(data, needed):
    versions = ["0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0"]
    accepted = []
    for version in versions:
        try:
            parse({**data, "cdiVersion": version})
        except SpecError as error:
            assert "is below" in str(error)
        else:
            accepted.append(version)
    assert accepted == versions[versions.index(needed) :]


def test_a_file_above_the_engines_version_is_refused():
    with pytest.raises(SpecError, match=r"above 0\.5\.0"):
        parse(spec(cdiVersion="0.6.0"), engine_version="0.5.0")


@pytest.fixture
def dirs(tmp_path):
    made = (tmp_path / "etc", tmp_path / "run")
    for path in made:
        path.mkdir()
    return made


def write(path, *names, env="A=1"):
    devices = [{"name": name, "containerEdits": {"env": [env]}} for name in names]
    path.write_text(json.dumps(spec(kind="a.b/cc", devices=devices)))


def resolve(dirs, *names):
    cache = SpecCache(dirs)
    return cache, cache.resolve(names)


def test_the_later_directory_wins(dirs):
    write(dirs[0] / "x.json", "d", env="FROM=etc")
    write(dirs[1] / "x.yaml", "d", env="FROM=run")
    cache, (device,) = resolve(dirs, "a.b/cc=d")
    assert device.edits["env"] == ["FROM=run"]
    assert cache.errors == {}


def test_a_device_in_two_files_of_one_directory_is_dropped_and_its_neighbours_stay(dirs):
    write(dirs[1] / "x.json", "d", "only-x")
    write(dirs[1] / "y.json", "d", "only-y")
    cache, found = resolve(dirs, "a.b/cc=only-x", "a.b/cc=only-y")
    assert len(found) == 2
    assert set(cache.errors) == {dirs[1] / "x.json", dirs[1] / "y.json"}
    with pytest.raises(UnresolvableError):
        cache.resolve(["a.b/cc=d"])


def test_a_bad_file_does_not_hide_the_others_and_hidden_files_count(dirs):
    (dirs[1] / "bad.json").write_text("{")
    (dirs[1] / "ignored.yml").write_text("{")
    (dirs[1] / "ignored.json.tmp").write_text("{")
    write(dirs[1] / ".hidden.yaml", "d")
    cache, found = resolve(dirs, "a.b/cc=d")
    assert [device.spec.path.name for device in found] == [".hidden.yaml"]
    assert set(cache.errors) == {dirs[1] / "bad.json"}


def test_all_missing_names_are_listed(dirs):
    write(dirs[1] / "x.json", "d")
    with pytest.raises(UnresolvableError) as caught:
        resolve(dirs, "a.b/cc=e", "a.b/cc=d", "x.y/zz=1")
    assert str(caught.value) == "unresolvable CDI devices a.b/cc=e, x.y/zz=1"


def test_a_missing_directory_is_no_error(tmp_path):
    cache = SpecCache((tmp_path / "none",))
    assert cache.resolve([]) == []
    assert cache.errors == {}
