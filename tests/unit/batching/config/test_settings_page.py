from __future__ import annotations

import re

import settings_page


def test_the_page_has_every_setting_of_the_class_once() -> None:
    page = settings_page.PAGE.read_text(encoding="utf-8")

    assert page == settings_page.written(page), "run tools/settings_page.py"
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(settings_page.NAMES)
    assert settings_page.meanings().keys() == set(settings_page.NAMES)
