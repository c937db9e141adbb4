"""Compile proto/ into clients/python/src/turnstream/wire, and store the hash of what was compiled.

Run by `make proto` with the pinned compiler (grpcio-tools 1.66.2): its code runs on protobuf 5.27
to 7, where the newest compiler would raise the floor for every training image. A unit test
compares the stored hash with proto/, so that stale generated code fails without the compiler.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROTO = ROOT / "proto"
OUT = ROOT / "clients/python/src"
HASH_FILE = OUT / "turnstream/wire/proto.sha256"


def proto_hash() -> str:
    """Hex SHA-256 over the names and contents of all .proto files, in order of name."""
    digest = hashlib.sha256()
    for path in sorted(PROTO.rglob("*.proto")):
        digest.update(path.relative_to(PROTO).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> None:
    """Compile every file; message classes with stubs, no gRPC stubs (the methods are few)."""
    files = [str(path) for path in sorted(PROTO.rglob("*.proto"))]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}"]
    subprocess.run([*command, f"--python_out={OUT}", f"--pyi_out={OUT}", *files], check=True)
    HASH_FILE.write_text(proto_hash() + "\n")


if __name__ == "__main__":
    main()
