"""The checked-in protobuf code was compiled from the .proto files that are checked in."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_generated_code_was_made_from_the_proto_files_as_they_are():
    spec = importlib.util.spec_from_file_location("generate_wire", ROOT / "tools/generate_wire.py")
    assert spec
    assert spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    stored = tool.HASH_FILE.read_text().strip()

    assert stored == tool.proto_hash(), "proto/ was edited: run `make proto`"
