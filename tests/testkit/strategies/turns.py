"""Turns of generators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import strategies as st

from testkit.strategies.values import (
    anchors,
    exactly,
    floats,
    floats32,
    logprobs_of_tokens,
    masked,
    masks,
    optional_versions,
    tokens,
    weights_of_tokens,
)
from turnstream.types import (
    NO_PARENT,
    ExtraPiece,
    StoredTurn,
    Turn,
    VersionRun,
)
from turnstream.types.extras import EXTRA_DTYPES


@st.composite
def turns(
    draw: st.DrawFn,
    prompt_ids: Sequence[int] | None = None,
    response_ids: Sequence[int] | None = None,
) -> Turn:
    """One model call: with this prompt or any, and this response or any that has a token."""
    prompt = draw(tokens()) if prompt_ids is None else np.array(prompt_ids, np.int32)
    response = (
        draw(tokens(min_size=1)) if response_ids is None else np.array(response_ids, np.int32)
    )
    num_tokens = len(response)
    loss_mask = draw(st.none() | masks(num_tokens))
    return Turn(
        prompt_ids=prompt,
        response_ids=response,
        logprobs=draw(st.none() | masked(floats(num_tokens, logprobs_of_tokens), loss_mask)),
        loss_mask=loss_mask,
        rewards=draw(st.none() | floats(num_tokens, floats32)),
        token_weights=draw(st.none() | masked(floats(num_tokens, weights_of_tokens), loss_mask)),
        version_runs=draw(version_runs(num_tokens)),
    )


@st.composite
def stored_turns(draw: st.DrawFn) -> StoredTurn:
    """A turn as it is stored: without a mask of ones, rewards of zeros and weights of ones.

    Its extra columns may be of any type and shape.
    """
    index = draw(st.integers(0, 4))
    parent = draw(st.integers(NO_PARENT, index - 1))
    turn = draw(turns())
    mask, rewards, weights = turn.loss_mask, turn.rewards, turn.token_weights
    if weights is not None and np.array_equal(
        weights, np.ones(len(weights)) if mask is None else mask
    ):
        weights = None
    return StoredTurn(
        index=index,
        parent_turn=parent,
        shared_tokens=0 if parent == NO_PARENT else draw(st.integers(0, 2**32 - 1)),
        token_ids=np.concatenate([turn.prompt_ids, turn.response_ids]),
        num_response_tokens=len(turn.response_ids),
        logprobs=turn.logprobs,
        loss_mask=None if mask is None or mask.all() else mask,
        rewards=None if rewards is None or not rewards.any() else rewards,
        token_weights=weights,
        version_runs=turn.version_runs,
        extras=draw(_extra_pieces(has_parent=parent != NO_PARENT)),
        anchor=draw(anchors),
    )


@st.composite
def _extra_pieces(draw: st.DrawFn, *, has_parent: bool) -> dict[str, ExtraPiece]:
    pieces: dict[str, ExtraPiece] = {}
    for name in sorted(draw(st.sets(st.sampled_from(["images", "routes", "teacher"])))):
        shape = draw(st.sampled_from([(), (2,), (2, 3)]))
        count = draw(st.integers(0, 3))
        numbers = draw(exactly(count * int(np.prod(shape)), st.integers(0, 99)))
        values = np.array(numbers, draw(st.sampled_from(EXTRA_DTYPES)))
        num_shared = draw(st.integers(0, 9)) if has_parent else 0
        pieces[name] = ExtraPiece(num_shared, values.reshape(count, *shape))
    return pieces


@st.composite
def version_runs(draw: st.DrawFn, num_tokens: int) -> tuple[VersionRun, ...]:
    """Runs that cover all tokens, or none where nothing is known."""
    if not num_tokens or not draw(st.booleans()):
        return ()
    cut = draw(st.integers(1, num_tokens))
    counts = filter(None, (cut, num_tokens - cut))
    return tuple(VersionRun(draw(optional_versions), count) for count in counts)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Turns that each see everything before them, and new observations; some sample nothing."""
    return _episode(draw, max_turns=4, recall=_all_of_the_last)


@st.composite
def trees(draw: st.DrawFn, max_turns: int = 5) -> tuple[Turn, ...]:
    """Turns that each see some earlier turn, or a part of it: sub-agents and edited contexts.

    Some sample nothing, as an aborted call does, and some say again what an earlier one said. None
    is without any token.
    """
    return _episode(draw, max_turns=max_turns, recall=_some_of_any)


@st.composite
def forests(draw: st.DrawFn, max_turns: int = 6) -> tuple[Turn, ...]:
    """Trees whose turns often repeat an earlier prompt, and whose responses differ at once.

    Each turn samples a token.
    """
    episode: list[Turn] = []
    for number in range(draw(st.integers(1, max_turns))):
        before = draw(st.sampled_from(episode)) if episode else None
        if before is not None and draw(st.booleans()):
            prompt = before.prompt_ids.tolist()
        else:
            known = _some_of_any(draw, episode) if episode else []
            prompt = [*known, *draw(tokens(max_size=2)).tolist()] or [7]
        response = [1_000 + number, *draw(st.just([]) | st.just([5]))]
        episode.append(draw(turns(prompt_ids=prompt, response_ids=response)))
    return tuple(episode)


def _all_of_the_last(draw: st.DrawFn, seen: list[Turn]) -> list[int]:
    return _tokens_of(seen[-1])


def _some_of_any(draw: st.DrawFn, seen: list[Turn]) -> list[int]:
    turn = draw(st.sampled_from(seen))
    known = draw(st.sampled_from([_tokens_of(turn), turn.prompt_ids.tolist()]))
    return known[: len(known) - draw(st.just(0) | st.integers(0, len(known)))]


def _tokens_of(turn: Turn) -> list[int]:
    return [*turn.prompt_ids.tolist(), *turn.response_ids.tolist()]


def _episode(
    draw: st.DrawFn,
    *,
    max_turns: int,
    recall: Callable[[st.DrawFn, list[Turn]], list[int]],
) -> tuple[Turn, ...]:
    episode: list[Turn] = []
    for _ in range(draw(st.integers(1, max_turns))):
        known = recall(draw, episode) if episode else []
        prompt = [*known, *draw(tokens(max_size=3)).tolist()]
        said = [turn.response_ids for turn in episode if prompt or len(turn.response_ids)]
        nothing = [np.empty(0, np.int32)] if prompt else []
        spoken = tokens(min_size=1)
        known_responses = [*nothing, *said]
        response = draw(spoken | st.sampled_from(known_responses) if known_responses else spoken)
        episode.append(draw(turns(prompt_ids=prompt, response_ids=response.tolist())))
    return tuple(episode)
