from __future__ import annotations

import re

import settings_page

from turnstream.batching.config import BatchingConfig


def test_the_page_has_every_setting_of_the_class_once() -> None:
    page = settings_page.PAGE.read_text(encoding="utf-8")

    assert page == settings_page.written(page), "run tools/settings_page.py"
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(settings_page.NAMES)
    assert settings_page.meanings().keys() == set(settings_page.NAMES)


def test_a_row_has_type_default_values_and_meaning() -> None:
    rows = {name: settings_page.row(name) for name in settings_page.NAMES}

    assert rows["turn_discount"].startswith("| `turn_discount` | number | `1.0` | 0 to 1 | gamma")
    assert '| choice | `"zero"` | `"zero"`, `"raw"` | advantage of a' in rows["singleton_advantage"]
    assert rows["batch_groups"].startswith("| `batch_groups` | whole number | required | at least")
    assert "It cannot be revised: generators" in rows["extra_columns"]
    assert BatchingConfig(batch_groups=2, mini_batch_groups=2).max_dead_bytes == 268435456
    assert "| `268435456` | at least 0 |" in rows["max_dead_bytes"]
