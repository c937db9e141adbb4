import numpy as np
import pytest

from turnstream.errors import InvalidConfigError
from turnstream_server.generators.guessing import (
    HIGHER,
    INVALID,
    LOWER,
    START,
    Episode,
    GuessingGame,
)


def _number(value: int) -> np.ndarray:
    """The response that says this number."""
    return np.array([INVALID + value], np.int32)


def test_game_answers_higher_or_lower_and_ends_at_the_secret() -> None:
    game = GuessingGame()

    first = game.step(Episode(secret=6), _number(8))
    second = game.step(first.episode, _number(4))
    third = game.step(second.episode, _number(6))

    assert first.observation_ids.tolist() == [LOWER]
    assert second.observation_ids.tolist() == [HIGHER]
    assert [answer.is_done for answer in (first, second, third)] == [False, False, True]
    assert [answer.reward for answer in (first, second, third)] == [0.0, 0.0, 1.0]
    assert len(third.observation_ids) == 0


def test_a_game_is_lost_when_the_guesses_are_used_up() -> None:
    game = GuessingGame(max_guesses=2)

    first = game.step(Episode(secret=6), _number(8))
    second = game.step(first.episode, _number(9))

    assert second.is_done
    assert second.reward == 0.0


@pytest.mark.parametrize("response", [[START], [HIGHER], [], [10, 11]])
def test_a_response_that_is_not_one_number_costs_a_guess(response: list[int]) -> None:
    game = GuessingGame()

    answer = game.step(Episode(secret=6), np.array(response, np.int32))

    assert answer.observation_ids.tolist() == [INVALID]
    assert answer.episode.num_guesses == 1
    assert not answer.is_done


def test_equal_seeds_begin_equal_games_and_secrets_are_spread_evenly() -> None:
    game = GuessingGame(num_numbers=5)

    secrets = [game.reset(seed=seed)[0].secret for seed in range(1000)]
    again = [game.reset(seed=seed)[0].secret for seed in range(1000)]

    assert secrets == again
    assert set(secrets) == {1, 2, 3, 4, 5}
    assert min(secrets.count(number) for number in range(1, 6)) > 150
    assert game.reset(seed=0)[1].tolist() == [START]


@pytest.mark.parametrize(("num_numbers", "max_guesses"), [(15, 4), (7, 3), (20, 3), (1, 1)])
def test_halving_earns_the_best_mean_reward(num_numbers: int, max_guesses: int) -> None:
    game = GuessingGame(num_numbers=num_numbers, max_guesses=max_guesses)

    rewards = [_play_by_halving(game, secret=n) for n in range(1, num_numbers + 1)]

    assert np.mean(rewards) == pytest.approx(game.best_mean_reward)


def test_every_token_of_a_game_is_in_the_vocabulary() -> None:
    game = GuessingGame(num_numbers=15)

    assert _number(15)[0] == game.vocab_size - 1
    assert game.max_tokens == 1 + 4 + 3  # the start, four guesses, three answers


@pytest.mark.parametrize("field", ["num_numbers", "max_guesses"])
def test_game_without_numbers_is_refused(field: str) -> None:
    with pytest.raises(InvalidConfigError, match=field):
        GuessingGame(**{field: 0})


def _play_by_halving(game: GuessingGame, *, secret: int) -> float:
    low, high = 1, min(game.num_numbers, 2**game.max_guesses - 1)
    episode = Episode(secret)
    while True:
        middle = (low + high) // 2
        answer = game.step(episode, _number(middle))
        if answer.is_done:
            return answer.reward
        is_higher = answer.observation_ids[0] == HIGHER
        low, high = (middle + 1, high) if is_higher else (low, middle - 1)
        episode = answer.episode
