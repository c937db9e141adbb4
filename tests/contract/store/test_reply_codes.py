"""Codes and facts of error replies, compared with the table in store/client/replies.py."""

from __future__ import annotations

import re

import pytest

from testkit.runs.scripts import script_files
from turnstream.store.client.replies import CODES, FACTS, parse_refusal

SCRIPTS = {path.name: path.read_text() for path in script_files().values()}
REPLY = re.compile(
    r"(?:error_reply\(|repl(?:y|ies\[[^]]*\]) = )'(?P<code>[A-Z_]{3,})\b(?P<rest>[^']*)'"
)
FACT = re.compile(r"^ \[(?P<word>[^\]]*)")


def error_replies() -> list[tuple[str, str, str]]:
    """(script, code, literal text after the code) of every error reply in the scripts."""
    return [
        (name, found["code"], found["rest"])
        for name, text in SCRIPTS.items()
        for found in REPLY.finditer(text)
        if found["code"] not in {"DUPLICATE", "SURPLUS"}
    ]


def test_every_error_reply_is_found_by_the_pattern() -> None:
    calls = sum(text.count("redis.error_reply('") for text in SCRIPTS.values())

    assert calls > 60
    assert len(error_replies()) >= calls


def test_scripts_use_exactly_the_codes_of_the_table() -> None:
    used = {code for _, code, _ in error_replies()}

    assert used == CODES


def test_scripts_use_exactly_the_facts_of_the_table() -> None:
    found = [FACT.match(rest) for _, _, rest in error_replies()]

    assert {fact["word"] for fact in found if fact and fact["word"]} == FACTS


@pytest.mark.parametrize("code", ["WAIT", "HELD", "GAP", "FORMAT"])
def test_codes_with_a_value_always_carry_it(code: str) -> None:
    rests = [rest for _, used, rest in error_replies() if used == code]

    assert rests
    assert all(rest == " [" for rest in rests)


@pytest.mark.parametrize("text", ["FENCED", "", "FENCED [released]", "FENCED []", "odd text"])
def test_reply_of_any_form_is_parsed(text: str) -> None:
    assert parse_refusal(text).code == text.partition(" ")[0]
    assert parse_refusal(text).message in str(parse_refusal(text).error)
