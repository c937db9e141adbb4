import pytest
from tokenizers import Tokenizer, decoders, models

from turnstream_server.models.sampling_requests import StopStringMatcher, decode, first_end


def _tokenizer(*words: str) -> Tokenizer:
    """Return a tokenizer of all bytes, and further tokens from id 256 on."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + index for index, word in enumerate(words)}
    model = models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<0x00>")
    tokenizer = Tokenizer(model)
    strip = decoders.Strip(content=" ", left=1, right=0)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _num_tokens_until_stop(
    token_ids: list[int], *stop_strings: str, words: tuple[str, ...] = (), prompt: bytes = b"x"
) -> int | None:
    tokenizer = _tokenizer(*words)
    matcher = StopStringMatcher(tokenizer, stop_strings, prompt_ids=list(prompt))
    return next((n for n, token in enumerate(token_ids, 1) if matcher.add(token)), None)


@pytest.mark.parametrize(
    ("token_ids", "stop", "words", "expected"),
    [
        ([256, 257, 258, 256], "\n\nUser:", ("ab\n", "\nUse", "r: c"), 3),  # inside of tokens
        *(
            ([*f"a{stop}b".encode()], stop, (), 1 + len(stop.encode()))
            for stop in ("é", "€uro", "日本")
        ),
        # 0x80 makes the run of bytes invalid, also those in front of it.
        ([*b"Q\x80\xff", 256, *b"end"], "end", ("▁a",), 7),
        ([*b"ser: User:"], "User:", (), 10),  # the prompt ends with U, and does not count
        ([256], " User", ("▁User",), 1),  # the space at the start of a response
    ],
)
def test_stop_string_ends_at_its_last_token(
    token_ids: list[int], stop: str, words: tuple[str, ...], expected: int
) -> None:
    found = _num_tokens_until_stop(token_ids, stop, words=words, prompt=b"stop at U")

    assert found == expected


def test_long_responses_are_matched_wherever_the_window_begins() -> None:
    for length in range(1, 120):
        ids = [*(b"abcdefgh" * 20)[:length], *b"STOP"]
        assert _num_tokens_until_stop(ids, "STOP", "never there") == length + 4


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert first_end("one two|three", ("|three", "two|")) == len("one two|")
    assert first_end("one two|three", ("four",)) is None


def test_special_tokens_are_part_of_the_text() -> None:
    tokenizer = _tokenizer()
    tokenizer.add_special_tokens(["<|end|>"])

    assert decode(tokenizer, [*b"ab", 256]) == "ab<|end|>"
