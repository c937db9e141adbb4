"""Session keys: their content, and changes of it."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnstream.errors import UnknownKeyError
from turnstream.types import TrajectoryKey
from turnstream.types.names import RunId
from turnstream_server.keys.sessions import Session, signed, verified

SECRET = b"s" * 32
SESSION = Session(RunId("demo~2"), TrajectoryKey("a/b", 3, 1), 8, expires_ms=1_000)
HOSTILE = ["/", "a/../b", "~2", "\x00", '"', "\u2028", "\U0001f9ea" * 42, "n" * 512, "[1,2]"]

names = st.sampled_from(HOSTILE) | st.text(st.characters(codec="utf-8"), min_size=1, max_size=512)
numbers = st.integers(0, 2**53 - 1)
sessions = st.builds(
    Session,
    run=names.map(RunId),
    key=st.builds(TrajectoryKey, names, numbers, numbers),
    num_samples=numbers,
    **dict.fromkeys(("prompt_uid", "policy", "key_id", "owner", "writer"), names | st.just("")),
    max_calls=numbers,
    max_tokens=numbers,
    expires_ms=st.integers(1, 2**53 - 1),
    may_seal=st.booleans(),
)


@given(session=sessions)
def test_session_key_has_all_of_its_content(session: Session):
    text = signed(session, SECRET)
    found = verified(text, SECRET, now_ms=session.expires_ms - 1)

    assert found == session
    assert type(found.run) is RunId
    assert text.startswith("tms-")
    assert set(text) <= {*string.ascii_letters, *string.digits, *"-_"}
    assert signed(session, SECRET) == text


def test_changed_session_key_is_refused():
    text = signed(SESSION, SECRET)
    changed = [text[:n] + new + text[n + 1 :] for n in range(len(text)) for new in ("", *"AB-=\n")]
    changed += [*(text[:n] for n in range(len(text))), f"{text}=", f" {text}", text + text, "tms-é"]
    changed += ["tms-" + "A" * 100_000, signed(SESSION, b"t" * 32)]

    for each in {*changed} - {text}:
        with pytest.raises(UnknownKeyError, match="not as it was made") as refused:
            verified(each, SECRET, now_ms=0)
        assert SECRET.decode() not in str(refused.value)


def test_expired_session_key_is_refused():
    with pytest.raises(UnknownKeyError, match="expired 2 s ago"):
        verified(signed(SESSION, SECRET), SECRET, now_ms=SESSION.expires_ms + 2_000)
    with pytest.raises(UnknownKeyError, match="expired 0 s ago"):
        verified(signed(SESSION, SECRET), SECRET, now_ms=SESSION.expires_ms)
