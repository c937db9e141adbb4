"""What `make mutate` breaks is in the source: a text that is gone tests nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", sorted({mutation.package for mutation in MUTATIONS}))
def test_every_guard_that_is_broken_is_in_the_source_once(package: str) -> None:
    def times(mutation: Mutation) -> int:
        source = ROOT / "clients/python/src/turnstream" / mutation.path
        return source.read_text().count(mutation.before)

    stale = [each.name for each in MUTATIONS if each.package == package and times(each) != 1]

    assert not stale


def test_every_mutation_changes_something_and_has_a_name_of_its_own() -> None:
    names = [mutation.name for mutation in MUTATIONS]

    assert [each.name for each in MUTATIONS if each.before == each.after] == []
    assert sorted(names) == sorted(set(names))
