from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tokenizers import Tokenizer

from turnstream.errors import InvalidConfigError
from turnstream_server.generators.chat import ChatTokenizer
from turnstream_server.generators.recordings import Message, Recording, read_groups


def recording(*texts: str, turns: tuple[int, ...]) -> Recording:
    roles = itertools.cycle(("user", "assistant"))
    messages = [Message(role=role, content=text) for role, text in zip(roles, texts, strict=False)]
    return Recording(prompt_uid="a", sample=0, reward=0.0, messages=messages, turns=[*turns])


@pytest.mark.parametrize(
    "text", ["plain", "", "\n\nstarts with newlines", "has <|im_start|>user\n in it", "ends \n\n"]
)
def test_encoding_each_message_once_equals_encoding_every_prefix_afresh(
    tokenizer_folder: Path, text: str
) -> None:
    chat = ChatTokenizer.load(tokenizer_folder)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    conversation = recording(text, text, text, text, text, "end", turns=(1, 3, 5))

    turns = chat.encode_turns(conversation)

    for index, turn in zip(conversation.turns, turns, strict=True):
        written = "".join(
            f"<|im_start|>{message.role}\n{message.text}<|im_end|>\n"
            for message in conversation.messages[:index]
        )
        afresh = tokenizer.encode(f"{written}<|im_start|>assistant\n", add_special_tokens=False)
        alone = tokenizer.encode(
            f"{conversation.messages[index].text}<|im_end|>", add_special_tokens=False
        )
        assert turn.prompt_ids.tolist() == afresh.ids
        assert turn.response_ids.tolist() == alone.ids
        assert turn.prompt_ids.dtype == turn.response_ids.dtype == np.int32


def test_reply_joined_with_its_header_does_not_continue_in_the_next_prompt(
    tokenizer_folder: Path,
) -> None:
    chat = ChatTokenizer.load(tokenizer_folder)

    first, second = chat.encode_turns(recording("hi", "\n", "more", "end", turns=(1, 3)))

    seen = np.concatenate([first.prompt_ids, first.response_ids])
    assert second.prompt_ids[: len(seen)].tolist() != seen.tolist()


def test_tokenizer_has_the_size_of_its_vocabulary_and_a_padding_token(
    tokenizer_folder: Path,
) -> None:
    chat = ChatTokenizer.load(tokenizer_folder)

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert chat.vocab_size == tokenizer.get_vocab_size(with_added_tokens=True)
    assert chat.pad_token_id == tokenizer.token_to_id("<|pad|>")
    assert chat.encode_turns(recording("hi", turns=())) == []


def test_tokenizer_without_chat_tokens_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    text = (tokenizer_folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<|im_end|>", "<|stop|>"))

    with pytest.raises(InvalidConfigError, match=r"has no token <\|im_end\|>"):
        ChatTokenizer.load(tmp_path)


@pytest.mark.slow
def test_the_template_of_the_folder_writes_the_same_text(
    data_folder: Path, stats: ModuleType
) -> None:
    transformers = pytest.importorskip("transformers")
    path = data_folder / "tau_bench_trajectories.jsonl.gz"
    template = transformers.AutoTokenizer.from_pretrained(data_folder / "tokenizer")
    chat = ChatTokenizer.load(data_folder / "tokenizer")
    [line, *_] = stats.load(str(path))
    recorded = read_groups(path)[0].recordings[0]

    turns = chat.encode_turns(recorded)

    for index, turn in zip(line["turns"], turns, strict=True):
        text = template.apply_chat_template(
            line["messages"][:index], tokenize=False, add_generation_prompt=True
        )
        assert turn.prompt_ids.tolist() == template.encode(text, add_special_tokens=False)
