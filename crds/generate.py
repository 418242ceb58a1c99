"""Writes the CustomResourceDefinitions of this folder from the models: `python crds/generate.py`, or `make crds`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from dra.api.policy_crd import node_crd, policy_crd

HEAD = "# Made from dra/api/policy_models.py by crds/generate.py (make crds); not edited by hand.\n"


def rendered() -> dict[str, str]:
    """Give the text of each file by its name."""

    def text(body: dict[str, Any]) -> str:
        # Through JSON, so that equal parts are written out and not referred to.
        return HEAD + yaml.safe_dump(json.loads(json.dumps(body)), sort_keys=False, width=110)

    return {"gpunodepolicies.yaml": text(policy_crd()), "gpunodes.yaml": text(node_crd())}


if __name__ == "__main__":
    for name, content in rendered().items():
        (Path(__file__).parent / name).write_text(content)
