"""Render `deploy/manifests` from the chart: `make manifests`; `--check` says whether they are current.

The manifests are what `kubectl apply` takes without Helm: no hooks, no labels that only Helm uses.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy/helm/dra-driver-nvidia-gpu"
MANIFESTS = ROOT / "deploy/manifests"
NAME = "dra-driver-nvidia-gpu"
# Made from the profiles that are known; the chart has a copy.
MIG_CLASSES = MANIFESTS / "deviceclasses-mig.yaml"
# Newest first fit: DeviceClasses of v1, rolling updates with two instances.
KUBERNETES = "1.36.0"

_ONLY_WEBHOOK = ("webhook.enabled=true", "resources.gpus.enabled=false", "fleet.enabled=false")
# file -> (templates, values)
FILES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rbac.yaml": (("namespace", "serviceaccounts", "rbac-kubeletplugin"), ("namespace.create=true", "fleet.enabled=false")),
    "crds.yaml": (("crds",), ()),
    "admission-policy.yaml": (("admission-policy",), ()),
    "deviceclasses.yaml": (("deviceclasses",), ()),
    "daemonset.yaml": (("kubeletplugin",), ()),
    "mps-keeper.yaml": (("mps-keeper",), ()),
    "fleet.yaml": (("serviceaccounts", "fleet"), ("resources.gpus.enabled=false",)),
    "webhook.yaml": (("serviceaccounts", "webhook"), _ONLY_WEBHOOK),
    "webhook-configuration.yaml": (("webhook-configuration",), _ONLY_WEBHOOK),
    "webhook-cert-manager.yaml": (("webhook-certificate",), _ONLY_WEBHOOK),
    "optional/network-policy.yaml": (("networkpolicy",), ("kubeletPlugin.networkPolicy.enabled=true",)),
    "optional/monitoring.yaml": (("monitoring",), ("serviceMonitor.enabled=true", "grafanaDashboard.enabled=true")),
    "optional/deviceclass-vfio.yaml": (("deviceclass-vfio",), ("featureGates.PassthroughSupport=true",)),
    "optional/openshift.yaml": (("openshift",), ("openshift.enabled=true",)),
}  # fmt: skip
_HELM_ONLY = re.compile(
    r"^ *annotations:\n *helm\.sh/resource-policy: .*\n|^ *(?:helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n",
    re.MULTILINE,
)
_SOURCE = re.compile(r"^# Source: .*\n", re.MULTILINE)
HEADER = "# Rendered from deploy/helm by deploy/render.py (make manifests); not edited by hand.\n"


def find_helm() -> str | None:
    """Give the helm program: of `make setup-chart`, else the machine's own."""
    own = ROOT / ".venv-chart/bin/helm"
    return str(own) if own.is_file() else shutil.which("helm")


def definitions() -> list[Path]:
    """Give the custom resources' definitions, which are made from the models."""
    return sorted((ROOT / "crds").glob("*.yaml"))


def copy_definitions() -> list[str]:
    """Put the definitions into the chart, which can only hold what lies in it."""
    folder = CHART / "files/crds"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in definitions():
        shutil.copyfile(path, folder / path.name)
    shutil.copyfile(MIG_CLASSES, CHART / "files/deviceclasses-mig.yaml")
    return []


def _same(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def render(helm: str, templates: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Give the text of some templates as `kubectl apply` takes it."""
    command = [
        helm,
        "template",
        NAME,
        str(CHART),
        "--namespace",
        NAME,
        "--kube-version",
        KUBERNETES,
        "--no-hooks",
    ]
    command += [f"--show-only=templates/{name}.yaml" for name in templates]
    command += [f"--set={value}" for value in (*values, "uninstallCheck.enabled=false")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    text = _SOURCE.sub("", _HELM_ONLY.sub("", done.stdout))
    documents = [document.strip("\n") for document in re.split(r"^---\n", text, flags=re.MULTILINE)]
    return HEADER + "\n---\n".join(document for document in documents if document.strip()) + "\n"


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    helm = find_helm()
    if helm is None:
        print("helm is not there: make setup-chart", file=sys.stderr)
        return 1
    stale = [] if args.check else copy_definitions()
    if args.check:
        stale += [
            f"files/crds/{path.name}"
            for path in definitions()
            if not _same(path, CHART / "files/crds" / path.name)
        ]
    for name, (templates, values) in FILES.items():
        path, text = MANIFESTS / name, render(helm, templates, values)
        if args.check:
            if not path.is_file() or path.read_text() != text:
                stale.append(name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if stale:
        print(f"not current: {', '.join(stale)}; run make manifests", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
