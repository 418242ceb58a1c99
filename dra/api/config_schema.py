"""The JSON Schema of the opaque configuration kinds, made from the models: `python -m dra.api.config_schema > FILE`.

It describes the grammar; what a combination of values means is checked by `dra validate`.
"""

from __future__ import annotations

import json
from typing import Any

from dra.api.config import GROUP_VERSION
from dra.api.config_models import KINDS

# Where the generated file is kept, from the repository's root.
SCHEMA_FILE = "docs/schemas/resource.nvidia.com_v1beta1.json"


def config_schema() -> dict[str, Any]:
    """Give the schema (draft 2020-12) that takes an object of any kind."""
    definitions: dict[str, Any] = {}
    for name, model in KINDS.items():
        schema = model.model_json_schema(ref_template="#/$defs/{model}")
        definitions |= schema.pop("$defs", {})
        definitions[name] = schema
    for definition in definitions.values():
        _tidy(definition)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Opaque device configuration {GROUP_VERSION}",
        "description": "Parameters of driver gpu.nvidia.com in ResourceClaims, templates and DeviceClasses.",
        "oneOf": [{"$ref": f"#/$defs/{name}"} for name in KINDS],
        "$defs": dict(sorted(definitions.items())),
    }


def schema_text() -> str:
    """Give the file's text."""
    return json.dumps(config_schema(), indent=2) + "\n"


def _tidy(node: Any) -> None:
    """Take the titles away, which only repeat the names, and say of null what it is: absent."""
    if isinstance(node, dict):
        node.pop("title", None)
        if node.get("default", 0) is None:
            del node["default"]
        for each in node.values():
            _tidy(each)
    elif isinstance(node, list):
        for each in node:
            _tidy(each)


if __name__ == "__main__":
    print(schema_text(), end="")
