"""Examples in docstrings and documents and generated code fit the sources."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
from pathlib import Path

import pytest

import turnstream
import turnstream_server

PACKAGES = (turnstream, turnstream_server)
DOCUMENTS = sorted((Path(__file__).parents[2] / "docs").rglob("*.md"))


def modules_with_examples() -> list[str]:
    """The modules in whose source an example stands."""
    return [
        info.name
        for package in PACKAGES
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if ">>> " in source(info.name)
    ]


def source(name: str) -> str:
    """The text of a module, which is not imported for it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_a_module_are_true(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)

    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if ">>> " in path.read_text()], ids=lambda path: path.name
)
def test_the_examples_of_a_document_are_true(path: Path) -> None:
    result = doctest.testfile(
        str(path), module_relative=False, optionflags=doctest.ELLIPSIS, encoding="utf-8"
    )

    assert result.attempted > 0
    assert result.failed == 0


ROOT = Path(__file__).parents[2]


def test_the_generated_code_was_made_from_the_proto_files_as_they_are():
    spec = importlib.util.spec_from_file_location("generate_wire", ROOT / "tools/generate_wire.py")
    assert spec
    assert spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    stored = tool.HASH_FILE.read_text().strip()

    assert stored == tool.proto_hash(), "proto/ was edited: run `make proto`"
