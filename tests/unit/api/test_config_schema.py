"""The JSON Schema in docs/ is that of the models, and agrees with what is decoded."""

from __future__ import annotations

import json
from pathlib import Path

from dra.api.config import GROUP_VERSION
from dra.api.config_models import FIELDS, KINDS
from dra.api.config_schema import SCHEMA_FILE, config_schema, schema_text

ROOT = Path(__file__).parents[3]


def test_the_file_is_current():
    text = (ROOT / SCHEMA_FILE).read_text(encoding="utf-8")
    assert text == schema_text(), f"make schema, or: python -m dra.api.config_schema > {SCHEMA_FILE}"


def test_it_has_every_kind_and_every_field():
    schema = config_schema()
    assert [each["$ref"].rpartition("/")[2] for each in schema["oneOf"]] == list(KINDS)
    named = {name for each in schema["$defs"].values() for name in each.get("properties", {})}
    assert named == FIELDS
    for kind in KINDS:
        definition = schema["$defs"][kind]
        assert definition["properties"]["apiVersion"]["const"] == GROUP_VERSION
        assert definition["additionalProperties"] is False
    # Everything that it refers to is there.
    text = json.dumps(schema)
    assert all(f'"#/$defs/{name}"' in text for name in ("TimeSlicingConfig", "MpsConfig", "IommuConfig"))
    assert "null" in json.dumps(schema["$defs"]["GpuConfig"])
