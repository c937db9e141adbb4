"""The links of turns, found by comparing lists: a slow reference."""

from __future__ import annotations

from collections.abc import Sequence

from turnstream.types import NO_PARENT, DeclaredColumn, Turn


def linked_slowly(
    turns: Sequence[Turn], declared: Sequence[DeclaredColumn] = ()
) -> list[tuple[int, int]]:
    """Return (parent, shared tokens) of every turn.

    A turn continues the longest row that its prompt begins with, of equal ones the newest, unless
    it has other items. Otherwise it follows the turn that holds the longest beginning: the lowest
    that ends there, or the lowest.
    """
    whole = [[*t.prompt_ids.tolist(), *t.response_ids.tolist()] for t in turns]
    links: list[tuple[int, int]] = []
    for index, one in enumerate(turns):
        prompt = one.prompt_ids.tolist()
        shared = [
            max(n for n in range(len(prompt) + 1) if prompt[:n] == earlier[:n])
            for earlier in whole[:index]
        ]
        most = max(shared, default=0)
        holders = [turn for turn in range(index) if most and shared[turn] == most]
        ending = [turn for turn in holders if len(whole[turn]) == most]
        continued = {
            parent for parent, count in links if parent >= 0 and count == len(whole[parent])
        }
        open_rows = [
            (shared[turn], turn)
            for turn in range(index)
            if shared[turn] == len(whole[turn]) and turn not in continued
        ]
        tried = [(turn, count) for count, turn in sorted(open_rows, reverse=True)]
        tried += [(turn, most) for turn in [*ending, *holders][:1]]
        same = [
            link
            for link in tried
            if _has_items_of(one, turns[link[0]], declared) or link[1] < len(whole[link[0]])
        ]
        links.append([*same, (NO_PARENT, 0)][0])
    return links


def _has_items_of(one: Turn, before: Turn, declared: Sequence[DeclaredColumn]) -> bool:
    names = [
        column.name for column in declared if column.per == "items" and column.name in one.extras
    ]
    kept = [(before.extras[name].tolist(), one.extras[name].tolist()) for name in names]
    return all(given[: len(known)] == known for known, given in kept)
