"""Write `dra/pb/*_pb2.py` and `*.pyi` from the definitions beside this script.

    python proto/generate.py [OUTPUT_ROOT]

OUTPUT_ROOT is the directory that holds the package `dra`; the repository's root if not given.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOOLS_VERSION = "1.75.1"


def generate(output_root: Path) -> int:
    """Run protoc over all definitions; gives its exit status."""
    from grpc_tools import protoc

    sources = sorted(str(path.relative_to(HERE)) for path in (HERE / "dra" / "pb").glob("*.proto"))
    # grpc_tools reads relative names against -I, never against the working directory.
    arguments = [
        "protoc", f"-I{HERE}", f"--python_out={output_root}", f"--pyi_out={output_root}",
        *(str(HERE / name) for name in sources),
    ]  # fmt: skip
    status = int(protoc.main(arguments))
    for name in sources if status == 0 else []:
        stub = output_root / name.replace(".proto", "_pb2.pyi")
        # protoc writes a bare Mapping, which mypy --strict does not take.
        stub.write_text('# mypy: disable-error-code="type-arg"\n' + stub.read_text())
    return status


def main() -> int:
    """Check the tool's version, then generate."""
    installed = version("grpcio-tools")
    if installed != TOOLS_VERSION:
        print(
            f"grpcio-tools {installed} is installed, the generated code needs {TOOLS_VERSION}",
            file=sys.stderr,
        )
        return 1
    return generate(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else HERE.parent)


if __name__ == "__main__":
    raise SystemExit(main())
