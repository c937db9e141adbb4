"""`turnstream text`: what the model read and wrote, as text."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from turnstream.errors import InvalidConfigError, ReleasedError
from turnstream.generator import Publisher
from turnstream_server.console.ledger import print_text, read_text

pytestmark = [pytest.mark.redis, pytest.mark.grpc]


NUMBERS = itertools.count()


def encode(folder: Path, text: str) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


@pytest.fixture
def written(place: Any, tokenizer_folder: Path) -> str:
    """A run with one sealed trajectory of two turns; the last token of the second is masked."""
    run = place.create_run(f"text {next(NUMBERS)}", batch_groups=2, max_staleness=3)
    prompt = encode(tokenizer_folder, "<|im_start|>the user")
    first = encode(tokenizer_folder, " says <hello> [/red]")
    asked = encode(tokenizer_folder, " and then?")
    second = encode(tokenizer_folder, " done!")
    with Publisher(place.url, run) as publisher, publisher.group("g", 1) as group:
        (trajectory,) = group
        trajectory.append(prompt, first, policy_version=4)
        mask = [1] * (len(second) - 1) + [0]
        trajectory.append(
            [*prompt, *first, *asked],
            second,
            loss_mask=mask,
            rewards=[0.25] * len(second),
            policy_version=5,
        )
        trajectory.seal(reward=0.5)
    return run


def test_text_has_prompts_sampled_and_masked_tokens_by_turn(
    place: Any, written: str, tokenizer_folder: Path
) -> None:
    shown = place.type("text", written, "g/0/0", "--tokenizer", str(tokenizer_folder))

    lines = [line.strip("─ ") for line in shown.splitlines()]
    num_shared = len(encode(tokenizer_folder, "<|im_start|>the user says <hello> [/red]"))
    second = encode(tokenizer_folder, " done!")
    assert lines[0] == f"{written}: g/0/0, sealed"
    assert lines[1] == "turn 0, policy version 4"
    assert lines[3:6:2] == ["<|im_start|>the user", "says <hello> [/red]"]
    assert lines[6] == (
        f"turn 1, policy version 5, after {num_shared} tokens of turn 0, "
        f"token rewards {0.25 * len(second):g}"
    )
    assert [line.split(":")[0] for line in lines if line.startswith("[")] == [
        *("[prompt", "[sampled", "[prompt", "[sampled", "[masked"),
    ]
    assert lines[-1] == "reward 0.5"
    as_json = place.type("text", written, "g/0/0", "--tokenizer", str(tokenizer_folder), "--json")
    content = json.loads(as_json)
    told = [each["text"] for turn in content["turns"] for each in turn["segments"]]
    assert "".join(told) == "<|im_start|>the user says <hello> [/red] and then? done!"
    assert content["reward"] == 0.5
    assert [turn["policy_versions"] for turn in content["turns"]] == [[4], [5]]


def test_text_on_a_terminal_colors_sampled_and_masked_tokens(
    place: Any, written: str, tokenizer_folder: Path
) -> None:
    terminal = Console(
        width=200, force_terminal=True, color_system="standard", markup=False, emoji=False
    )
    with terminal.capture() as capture:
        content = read_text(place.url, written, "g/0/0", tokenizer=tokenizer_folder)
        print_text(content, terminal)

    shown = capture.get()
    assert "\x1b[1;32m says <hello>" in shown
    assert "\x1b[2m<|im_start|>the user" in shown
    assert "\x1b[33m!" in shown


def test_text_without_tokenizer_or_stored_turns_is_refused(
    place: Any, written: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfigError, match=r"--tokenizer: .* has no tokenizer\.json"):
        place.type("text", written, "g/0/0", "--tokenizer", str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidConfigError, match="is no tokenizer"):
        place.type("text", written, "g/0/0", "--tokenizer", str(tmp_path))

    with Publisher(place.url, written) as publisher, publisher.group("gone", 1) as group:
        group.trajectory(0).abandon("no luck").result(10)
    with pytest.raises(ReleasedError, match="turns of gone/0/0 are not stored any more"):
        place.type("text", written, "gone/0/0", "--tokenizer", str(tokenizer_folder))
