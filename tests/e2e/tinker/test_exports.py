"""Exported weights, as the real SDK and its command line download them."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

from testkit.datums import as_sent, random_data
from testkit.sdks import BASE, Hosting, Sdk


def test_exports_are_downloaded_by_the_sdk_and_its_command_line(
    hosting: Hosting, sdk: Callable[..., Sdk], tmp_path: Path
) -> None:
    """Takes more than 5 s: the services that host models start, and the SDK twice."""
    data = as_sent(random_data(20, (6, 3)))

    result = sdk().run(BASE, "exported", data=data, folder=str(tmp_path))

    names = ["adapter_config.json", "adapter_model.safetensors"]
    assert result["files"] == names
    assert result["kinds"] == ["external", "training"]
    (by_command,) = (each.parent for each in (tmp_path / "of-state").rglob("*.safetensors"))
    for name in names:
        assert filecmp.cmp(tmp_path / name, by_command / name, shallow=False)
    found, saved = (
        load_file(each / "adapter_model.safetensors")
        for each in (tmp_path, hosting.saved(result["saved"]))
    )
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert any(value.any() for name, value in found.items() if "lora_B" in name)
