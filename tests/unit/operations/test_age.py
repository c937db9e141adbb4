"""Files encrypted for owners of public keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyrage
import pytest

from turnstream.errors import BatchingError
from turnstream_server.operations.age import check_recipients, encrypt_folder

AGE: Any = pyrage
SSH_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIE8fUvyqULyYBRYUVdkp4SAP+2fz7Ii3SmdR5Csg6SfM someone"


def test_each_recipient_decrypts_all_files_and_no_plain_one_is_left(tmp_path: Path) -> None:
    one, two, stranger = (AGE.x25519.Identity.generate() for _ in range(3))
    (tmp_path / "below").mkdir()
    files = {"a.json": b"{}", "below/weights": bytes(range(256)) * 500}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)

    encrypt_folder(tmp_path, [str(one.to_public()), str(two.to_public()), SSH_KEY])

    found = {each.relative_to(tmp_path).as_posix() for each in tmp_path.rglob("*.*")}
    assert found == {"a.json.age", "below/weights.age"}
    for name, content in files.items():
        encrypted = (tmp_path / f"{name}.age").read_bytes()
        assert AGE.decrypt(encrypted, [one]) == AGE.decrypt(encrypted, [two]) == content
        with pytest.raises(AGE.DecryptError):
            AGE.decrypt(encrypted, [stranger])


@pytest.mark.parametrize("text", ["", "age1x", "ssh-rsa x", "AGE-SECRET-KEY-1X"])
def test_text_that_is_no_public_key_is_refused(text: str) -> None:
    good = str(AGE.x25519.Identity.generate().to_public())
    check_recipients([good, SSH_KEY])

    with pytest.raises(BatchingError, match=f"age_encryption_recipients, 1: '{text}' is no public"):
        check_recipients([good, text])
