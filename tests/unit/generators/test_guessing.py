from __future__ import annotations

import numpy as np
import pytest

from turnstream_server.generators.guessing import (
    HIGHER,
    INVALID,
    LOWER,
    MAX_GUESSES,
    MAX_TOKENS,
    NUM_NUMBERS,
    START,
    VOCAB_SIZE,
    Answer,
    Episode,
    reset,
    step,
)


def _number(value: int) -> np.ndarray:
    """Return the response that is this number."""
    return np.array([INVALID + value], np.int32)


def _play(*guesses: int, secret: int) -> list[Answer]:
    answers: list[Answer] = []
    episode = Episode(secret)
    for guess in guesses:
        answers.append(step(episode, _number(guess)))
        episode = answers[-1].episode
    return answers


def test_game_answers_higher_or_lower_and_ends_at_the_secret() -> None:
    answers = _play(8, 4, 6, secret=6)

    assert [answer.observation_ids.tolist() for answer in answers] == [[LOWER], [HIGHER], []]
    assert [answer.is_done for answer in answers] == [False, False, True]
    assert [answer.reward for answer in answers] == [0.0, 0.0, 1.0]


def test_game_is_lost_when_the_guesses_are_used_up() -> None:
    answers = _play(*[8] * MAX_GUESSES, secret=6)

    assert [answer.is_done for answer in answers] == [False] * (MAX_GUESSES - 1) + [True]
    assert answers[-1].reward == 0.0


@pytest.mark.parametrize("response", [[START], [HIGHER], [], [10, 11]])
def test_response_that_is_not_one_number_costs_a_guess(response: list[int]) -> None:
    answer = step(Episode(secret=6), np.array(response, np.int32))

    assert answer.observation_ids.tolist() == [INVALID]
    assert answer.episode.num_guesses == 1
    assert not answer.is_done


def test_equal_seeds_begin_equal_games_and_secrets_are_spread_evenly() -> None:
    secrets = [reset(seed=seed)[0].secret for seed in range(1500)]

    assert secrets == [reset(seed=seed)[0].secret for seed in range(1500)]
    assert set(secrets) == {*range(1, NUM_NUMBERS + 1)}
    assert min(map(secrets.count, range(1, NUM_NUMBERS + 1))) > 60
    assert reset(seed=0)[1].tolist() == [START]


def test_halving_finds_every_secret() -> None:
    for secret in range(1, NUM_NUMBERS + 1):
        low, high, answers = 1, NUM_NUMBERS, list[Answer]()
        while not answers or not answers[-1].is_done:
            middle = (low + high) // 2
            episode = answers[-1].episode if answers else Episode(secret)
            answers.append(step(episode, _number(middle)))
            low, high = (middle + 1, high) if secret > middle else (low, middle - 1)
        assert answers[-1].reward == 1.0


def test_every_token_of_a_game_is_in_the_vocabulary() -> None:
    assert _number(NUM_NUMBERS)[0] == VOCAB_SIZE - 1
    assert MAX_TOKENS == 1 + 4 + 3  # the start, four guesses, three answers
