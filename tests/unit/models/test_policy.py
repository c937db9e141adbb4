import json
from pathlib import Path

import pytest
import torch

from turnstream.errors import InvalidConfigError
from turnstream_server.models.folders import new_folder
from turnstream_server.models.policy import load_policy
from turnstream_server.models.spec import SmallModelSpec, read_policy_source

SPEC = SmallModelSpec(vocab_size=40, hidden_size=16, intermediate_size=16, num_layers=1)


def test_equal_specs_give_equal_weights_and_keep_the_random_state() -> None:
    before = torch.get_rng_state()

    first, second = load_policy(SPEC), load_policy(SPEC)

    assert torch.equal(before, torch.get_rng_state())
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name]), name


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    def write(name: str, *, fails: bool = False) -> None:
        with new_folder(tmp_path / "weights") as written:
            (written / name).write_text("content")
            if fails:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write("half", fails=True)
    assert list(tmp_path.iterdir()) == []
    for name in ("old", "new"):
        write(name)
    with pytest.raises(OSError, match="disk full"):
        write("half", fails=True)

    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_a_spec_is_read_from_a_file_and_a_folder_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"vocab_size": 40, "num_layers": 1}))

    sources = [read_policy_source(path), read_policy_source(tmp_path)]

    assert sources == [SmallModelSpec(vocab_size=40, num_layers=1), tmp_path]


@pytest.mark.parametrize("text", ["", "[]", '{"vocab_size": 40, "colour": 1}', "{}"])
def test_invalid_spec_file_is_refused_with_its_path(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text)

    with pytest.raises(InvalidConfigError, match="policy"):
        read_policy_source(path)


@pytest.mark.parametrize("source", [None, SmallModelSpec(architecture="no-model", vocab_size=40)])
def test_source_without_a_model_is_refused_by_its_name(
    tmp_path: Path, source: SmallModelSpec | None
) -> None:
    with pytest.raises(InvalidConfigError, match=source.architecture if source else tmp_path.name):
        load_policy(source or tmp_path)
