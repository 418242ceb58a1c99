"""What `dra validate` says of good and bad manifests."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import yaml

from dra.api.rules.classes import TYPE_OF_CLASS, class_expression
from dra.cli.main import main
from dra.cli.validate import known_devices
from dra.diagnose.validate import validate_manifests, validate_paths
from dra.diagnose.validate_source import manifest_of
from tests.yaml_text import read, read_all

ROOT = Path(__file__).parents[3]
BAD = ROOT / "tests" / "data" / "bad-manifests"

CLAIM = """\
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: one, namespace: team}
spec:
  devices:
    requests:
    - name: gpu
      exactly:
        deviceClassName: %s
"""
POD = """\
apiVersion: v1
kind: Pod
metadata: {name: user, namespace: team}
spec:
  containers:
  - {name: main, image: ubuntu, resources: {claims: [{name: gpu}]}}
  resourceClaims:
  - {name: gpu, %s}
"""


@pytest.fixture(scope="session")
def known():
    return list(known_devices())


@pytest.fixture
def check(tmp_path, known):
    def run(*texts: str, name: str = "file.yaml"):
        path = tmp_path / name
        path.write_text("---\n".join(texts), encoding="utf-8")
        return validate_paths([str(path)], known_devices=lambda: known)

    return run


def claim_with(*selectors: str, device_class: str = "gpu.nvidia.com", more: str = "") -> str:
    text = CLAIM % device_class + more
    if selectors:
        text += "        selectors:\n"
    return text + "".join(f"        - cel: {{expression: {json.dumps(one)}}}\n" for one in selectors)


def codes(report) -> list[str]:
    return [finding.code for finding in report.findings]


def test_all_examples_are_clean_even_when_warnings_count(capsys):
    assert main(["validate", "--strict", str(ROOT / "examples")]) == 0
    assert capsys.readouterr().out == ""


def test_each_bad_manifest_gives_exactly_the_findings_expected_of_it_at_their_lines(known):
    report = validate_paths([str(BAD)], known_devices=lambda: known)
    found = [f"{Path(f.file).name}:{f.line} {f.severity} {f.code}" for f in report.findings]
    assert found == (BAD / "expected.txt").read_text(encoding="utf-8").splitlines()
    assert {Path(f.file).name for f in report.findings} == {p.name for p in BAD.iterdir()} - {"expected.txt"}


def test_a_bad_expression_is_shown_with_a_caret_below_the_place_and_the_line_inside_a_block(capsys):
    assert main(["validate", str(BAD / "cel-in-a-block.yaml")]) == 1
    lines = capsys.readouterr().out.splitlines()
    line = 'device.capacity["gpu.nvidia.com"].memory > quantity("40Gi") &&'
    assert lines[0].startswith(
        f"{BAD / 'cel-in-a-block.yaml'}:14: error DRA-CEL-COMPILE: ResourceClaim team/cel-block "
    )
    assert lines[1:3] == [f"    {line}", " " * (4 + line.index(">")) + "^"]
    assert "isGreaterThan" in lines[3]
    assert (BAD / "cel-in-a-block.yaml").read_text().splitlines()[13].strip() == line


def test_the_caret_stays_below_its_place_in_a_long_line(check):
    term = 'device.driver == "gpu.nvidia.com" && '
    report = check(claim_with(term * 6 + "device.oops && " + term * 6 + "true"))
    (finding,) = report.findings
    line, caret = finding.excerpt
    assert len(line) <= 102
    assert line[caret.index("^") :].startswith(".oops")


def test_json_output_has_all_a_program_needs(capsys):
    assert main(["validate", "-o", "json", str(BAD / "pod-fraction.yaml")]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["errors"], answer["warnings"], answer["objects"]) == (1, 0, 1)
    (finding,) = answer["findings"]
    assert finding["line"] == 10
    assert finding["object"] == "Pod team/fraction"
    assert finding["field"] == "spec.containers[0].resources.limits[nvidia.com/gpu]"
    assert finding["message"].startswith("0.2 of nvidia.com/gpu cannot be had")
    assert "ResourceClaim" in finding["remedy"]


def test_warnings_fail_only_when_strict(capsys):
    file = str(BAD / "misspelt-attribute.yaml")
    assert main(["validate", file]) == 0
    assert main(["validate", "--strict", file]) == 1
    assert "Did you mean productName?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('device.attributes["gpu.nvidia.com"].memory > 5', 'device.capacity["gpu.nvidia.com"].memory'),
        (
            'device.capacity["gpu.nvidia.com"].uuid.isGreaterThan(quantity("1"))',
            'device.attributes["gpu.nvidia.com"].uuid',
        ),
        (
            'device.attributes["gpu.nvidia.com"].pcieRoot == "pci0000:00"',
            'device.attributes["resource.kubernetes.io"].pcieRoot',
        ),
    ],
)
def test_a_name_that_stands_elsewhere_is_shown_where_it_stands(tmp_path, capsys, written, meant):
    template = {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": "one", "namespace": "default"},
        "spec": {"devices": {"requests": [
            {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com", "selectors": [{"cel": {"expression": written}}]}}
        ]}},
    }  # fmt: skip
    file = tmp_path / "one.json"
    file.write_text(json.dumps(template))
    main(["validate", str(file)])
    assert f"Correct the name. Did you mean {meant}?" in capsys.readouterr().out
    capsys.readouterr()
    main(["inventory", "--simulate", "dgx-a100", "-o", "slices"])
    slices = tmp_path / "slices.yaml"
    slices.write_text(capsys.readouterr().out)
    classes = str(ROOT / "deploy/manifests/deviceclasses.yaml")
    main(["explain", "claim/one", "-f", str(file), str(slices), classes])
    assert f"Write {meant} if that is meant." in capsys.readouterr().out


def test_standard_input_is_read_for_a_dash(monkeypatch, capsys):
    text = claim_with() + "        cuont: 2\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["validate", "-"]) == 1
    assert capsys.readouterr().out.startswith("standard input:10: error DRA-SCHEMA-UNKNOWN-FIELD")


@pytest.mark.parametrize(
    ("text", "line", "code"),
    [
        ("a: [1\nb: 2\n", 2, "DRA-MANIFEST-SYNTAX"),
        ('{"a": 1,\n "b" 2}', 2, "DRA-MANIFEST-SYNTAX"),
        ("kind: Pod\nname: {{ .Values.name }}\n", 2, "DRA-MANIFEST-SYNTAX"),
        ("a: &a [*a]\n", 1, "DRA-MANIFEST-SYNTAX"),
        ("a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(8)
        ), None, "DRA-MANIFEST-SYNTAX"),
    ],
)  # fmt: skip
def test_what_cannot_be_parsed_is_an_error_at_its_line_and_exit_code_two(check, text, line, code):
    report = check(text)
    assert codes(report) == [code]
    assert line in (None, report.findings[0].line)
    assert report.exit_code() == 2
    assert ("helm template" in report.findings[0].remedy) == ("{{" in text)


def test_a_missing_file_does_not_keep_the_others_from_being_checked(tmp_path, known):
    report = validate_paths(
        [str(tmp_path / "gone.yaml"), str(BAD / "wrong-type.yaml")], known_devices=lambda: known
    )
    assert codes(report) == ["DRA-MANIFEST-UNREADABLE", "DRA-SCHEMA-TYPE"]
    assert report.exit_code() == 2


def test_a_folder_is_read_with_the_folders_in_it_but_not_the_hidden_ones(tmp_path):
    for place in ("a.yaml", "in/b.yml", "in/c.json", "in/notes.txt", ".git/d.yaml"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text("[]\n")
    report = validate_paths([str(tmp_path)], known_devices=tuple)
    assert [Path(f.file).name for f in report.findings] == ["a.yaml", "b.yml", "c.json"]


def test_values_are_read_as_kubectl_reads_them(check):
    # Times and 1:30 stay text, keys become text, 0o644 is a number, merges and anchors are followed.
    report = check("""\
apiVersion: v1
kind: Pod
metadata:
  name: odd
  creationTimestamp: 2026-01-31T12:00:00Z
  annotations: &notes {a: 1:30, 2: "x", true: "y"}
  labels: {<<: *notes, b: "z", a: short}
spec:
  containers: [{name: main, image: ubuntu}]
  volumes:
  - name: v
    secret: {secretName: s, defaultMode: 0o644}
""")
    assert codes(report) == []


def test_the_same_claim_is_clean_in_every_version_of_the_api(check):
    nested = claim_with('device.attributes["gpu.nvidia.com"].architecture == "Hopper"')
    flat = nested.replace("      exactly:\n", "").replace("        ", "      ")
    versions = [nested.replace("/v1", "/v1beta2"), flat.replace("/v1", "/v1beta1"), nested]
    for text in versions:
        assert codes(check(text)) == []


def test_a_path_in_v1beta1_is_the_one_in_the_file(check):
    text = claim_with().replace("      exactly:\n        ", "      ").replace("/v1", "/v1beta1")
    (finding,) = check(text + "      count: -1\n").findings
    assert (finding.path, finding.line) == ("spec.devices.requests[0].count", 9)


def test_one_misspelt_field_gives_one_finding(check):
    report = check(CLAIM.replace("deviceClassName", "deviceClass") % "gpu.nvidia.com")
    assert codes(report) == ["DRA-SCHEMA-UNKNOWN-FIELD"]
    assert "Did you mean deviceClassName?" in report.findings[0].message


def test_a_class_of_the_files_decides_what_its_name_selects(check):
    device_class = """\
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: hoppers}
spec:
  selectors:
  - cel: {expression: 'device.driver == "gpu.nvidia.com" && device.attributes["gpu.nvidia.com"].architecture == "Hopper"'}
"""
    ada = 'device.attributes["gpu.nvidia.com"].productName == "NVIDIA L40S"'
    assert codes(check(device_class, claim_with(device_class="hoppers"))) == []
    report = check(device_class, claim_with(ada, device_class="hoppers"))
    assert codes(report) == ["DRA-REQUEST-NO-DEVICE"]
    assert 'productName = "NVIDIA H100 80GB HBM3"' in report.findings[0].message


@pytest.mark.parametrize(
    "expression",
    [
        'device.attributes["gpu.nvidia.com"].driverVersion.isGreaterThan(semver("900.0.0"))',
        'device.attributes["gpu.nvidia.com"].uuid == "GPU-1"',
        'device.attributes["resource.kubernetes.io"].numaNode == 31',
    ],
)
def test_what_depends_on_the_installation_is_no_reason_for_a_warning(check, expression):
    assert codes(check(claim_with(expression))) == []


@pytest.mark.parametrize(
    ("device_class", "expression"),
    [
        ("mig.nvidia.com", 'device.attributes["gpu.nvidia.com"].profile == "1g.10gb"'),
        ("vfio.gpu.nvidia.com", 'device.attributes["gpu.nvidia.com"].deviceID == "0x2330"'),
        ("nic.example.com", 'device.attributes["nic.example.com"].speed == 400'),
    ],
)
def test_requests_that_can_be_met_or_that_nobody_here_can_judge_are_clean(check, device_class, expression):
    assert codes(check(claim_with(expression, device_class=device_class))) == []


def test_a_mig_profile_that_no_gpu_has_is_a_warning_with_the_nearest(check):
    report = check(
        claim_with('device.attributes["gpu.nvidia.com"].profile == "9g.90gb"', device_class="mig.nvidia.com")
    )
    assert codes(report) == ["DRA-REQUEST-NO-DEVICE"]
    assert 'profile = "1g.5gb"' in report.findings[0].message


def test_more_capacity_than_any_gpu_has_is_a_warning(check):
    more = "        capacity: {requests: {memory: 900Gi}}\n"
    assert codes(check(claim_with(more=more))) == ["DRA-REQUEST-NO-DEVICE"]
    assert codes(check(claim_with(more=more.replace("900", "40")))) == []
    # Shares come with a node's settings.
    assert codes(check(claim_with(more=more.replace("memory: 900Gi", "shares: 2")))) == []


def test_machines_are_not_looked_at_for_plain_requests():
    def never():
        raise AssertionError("asked for the known devices")

    manifest = manifest_of(read(claim_with(more="        count: 8\n")))
    assert validate_manifests([manifest], known_devices=never).findings == []


def test_opaque_parameters_are_judged_as_prepare_judges_them(check):
    def config(parameters: str) -> str:
        text = (
            claim_with()
            + "    config:\n    - requests: [gpu]\n      opaque:\n        driver: gpu.nvidia.com\n"
        )
        return text + f"        parameters: {{apiVersion: resource.nvidia.com/v1beta1, {parameters}}}\n"

    clean = ["kind: GpuConfig", "kind: GpuConfig, sharing: {strategy: TimeSlicing, timeSlicingConfig: {}}",
             "kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultActiveThreadPercentage: 50}}"]  # fmt: skip
    assert [codes(check(config(one))) for one in clean] == [[], [], []]
    bad = {
        "kind: gpuConfig": "DRA-CONFIG-KIND",
        "kind: GpuConfig, Sharing: {}": "DRA-CONFIG-FIELD",
        "kind: GpuConfig, sharing: {}": "DRA-CONFIG-FIELD",
        "kind: GpuConfig, sharing: {strategy: MPS, mpsConfig: {defaultPinnedDeviceMemoryLimit: 1k}}": "DRA-CONFIG-FIELD",
    }
    assert [codes(check(config(one))) for one in bad] == [[code] for code in bad.values()]


def test_sharing_of_a_template_is_fine_when_a_second_container_uses_the_claim(check):
    template, deployment = (BAD / "sharing-that-shares-nothing.yaml").read_text().split("---\n")
    container = "      - name: main\n        image: ubuntu:24.04\n        resources:\n          claims: [{name: gpu}]\n"
    assert container in deployment
    two = deployment.replace(container, container + container.replace("main", "side"))
    assert codes(check(template, deployment)) == ["DRA-CONFIG-NOTHING-SHARES"]
    assert codes(check(template, two)) == []
    # Who uses it otherwise is not known.
    assert codes(check(template)) == []


def test_a_template_that_the_files_do_not_have_is_only_an_information(check):
    report = check(POD % "resourceClaimTemplateName: far")
    assert [(f.severity, f.code) for f in report.findings] == [("info", "DRA-POD-CLAIM-ELSEWHERE")]
    assert report.exit_code(strict=True) == 0


@pytest.mark.parametrize("kind", ["Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob"])
def test_pod_templates_of_workloads_are_checked_as_pods_are(check, kind):
    pod = {
        "metadata": {"labels": {"a": "b"}},
        "spec": {
            "restartPolicy": "Never" if "Job" in kind else "Always",
            "containers": [{"name": "main", "image": "x", "resources": {"claims": [{"name": "none"}]}}],
        },
    }
    spec = {"template": pod}
    if "Job" not in kind:
        spec["selector"] = {"matchLabels": {"a": "b"}}
    if kind == "CronJob":
        spec = {"schedule": "* * * * *", "jobTemplate": {"spec": spec}}
    group = "batch/v1" if "Job" in kind else "apps/v1"
    report = check(
        yaml.safe_dump({"apiVersion": group, "kind": kind, "metadata": {"name": "w"}, "spec": spec})
    )
    assert codes(report) == ["DRA-POD-CLAIM-UNKNOWN"]
    assert report.findings[0].path.endswith("template.spec.containers[0].resources.claims[0]")


def test_old_groups_of_workloads_are_named(check):
    report = check("apiVersion: extensions/v1beta1\nkind: Deployment\nmetadata: {name: x}\n")
    assert codes(report) == ["DRA-MANIFEST-VERSION"]
    assert "apps/v1" in report.findings[0].remedy


def test_other_kinds_are_left_alone(check):
    report = check("apiVersion: v1\nkind: Service\nmetadata: {name: 7}\nspec: whatever\n")
    assert (codes(report), report.skipped, report.objects) == ([], 1, 0)


def test_the_built_in_classes_are_those_of_the_plain_manifests():
    text = (ROOT / "deploy" / "manifests" / "deviceclasses.yaml").read_text(encoding="utf-8")
    shipped = {
        one["metadata"]["name"]: one["spec"]["selectors"][0]["cel"]["expression"]
        for one in read_all(text)
        if one["metadata"]["name"] in TYPE_OF_CLASS
    }
    assert shipped
    assert shipped == {name: class_expression(name) for name in shipped}


FRACTION = """
apiVersion: v1
kind: Namespace
metadata: {name: team, labels: {LABEL}}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: d, namespace: team}
spec:
  selector: {matchLabels: {app: d}}
  template:
    metadata: {labels: {app: d}}
    spec:
      containers:
      - {name: main, image: x, resources: {limits: {nvidia.com/gpu: VALUE}}}
"""


@pytest.mark.parametrize(
    ("label", "value", "found"),
    [
        ("gpudra.dev/fractions: enabled", "0.2", []),
        ("gpudra.dev/fractions: enabled", "1.5", ["DRA-FRACTION-RANGE"]),
        ("gpudra.dev/fractions: disabled", "0.2", ["DRA-POD-GPU-FRACTION"]),
    ],
)
def test_a_fraction_is_right_where_the_webhook_rewrites_it(check, label, value, found):
    report = check(FRACTION.replace("LABEL", label).replace("VALUE", value))
    assert codes(report) == found
    assert all(finding.line == 15 and finding.remedy for finding in report.findings)


def test_a_cron_job_is_checked_with_its_schedule(tmp_path, capsys):
    file = tmp_path / "cron.yaml"
    file.write_text(
        "apiVersion: batch/v1\nkind: CronJob\nmetadata: {name: nightly}\nspec:\n  schedule: 61 2 * * *\n"
        "  jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: a, image: b}]}}}}\n"
    )
    assert main(["validate", str(file)]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith(f"{file}:5: error DRA-API-INVALID: CronJob nightly spec.schedule:")
    assert "end of range (61) above maximum (59)" in line
