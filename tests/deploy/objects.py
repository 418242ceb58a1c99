"""Validate Kubernetes objects against the published schemas of a release; run with the Python of `.venv-chart`.

Reads JSON lines `{"version": "1.36", "where": ..., "object": {...}}`, prints one line for each that is wrong.
"""

from __future__ import annotations

import json
import sys

import kubernetes_validate


def main() -> int:
    """Check all of standard input."""
    for line in sys.stdin:
        entry = json.loads(line)
        try:
            kubernetes_validate.validate(entry["object"], entry["version"], strict=True)
        except kubernetes_validate.ValidationError as error:
            print(f"{entry['where']}: {error.message} at {list(error.path)}")
        except kubernetes_validate.SchemaNotFoundError:
            print(f"{entry['where']}: no schema for {entry['object']['kind']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
