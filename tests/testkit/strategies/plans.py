"""Input and content of plans: events, configurations, manifests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, Final, get_args, get_type_hints

from hypothesis import strategies as st

from testkit.strategies.extras import declared_columns
from testkit.strategies.values import (
    anchors,
    crcs,
    exactly,
    figures,
    floats32,
    keys,
    names,
    numbers_by_name,
    optional_versions,
    rewards_of_trajectories,
    texts_by_name,
    versions,
)
from turnstream.batching.config import BatchingConfig, GroupFilter
from turnstream.batching.config.rules import LEAST_GROUP_BYTES
from turnstream.batching.config.values import MAX_TURN_WEIGHT
from turnstream.batching.merge.plan import (
    GroupPlan,
    Manifest,
    MiniBatchPlan,
    SequenceShape,
    TrajectoryPlan,
)
from turnstream.types import (
    NO_PARENT,
    Denominators,
    Event,
    GroupOpened,
    Purpose,
    SealedTrajectory,
    Status,
    TurnShape,
    VersionRun,
)


@st.composite
def sealed_trajectories(draw: st.DrawFn) -> SealedTrajectory:
    shapes: list[TurnShape] = []
    for index in range(draw(st.integers(0, 4))):
        parent = draw(st.integers(NO_PARENT, index - 1))
        most = 0 if parent == NO_PARENT else shapes[parent].num_tokens
        response = draw(st.integers(0, 9))
        counts = (draw(st.integers(0, most)), draw(st.integers(0, 9)), response)
        shapes.append(TurnShape(parent, *counts, draw(st.integers(0, response))))
    num_turns = len(shapes)
    return SealedTrajectory(
        key=draw(keys),
        lease_epoch=draw(st.integers(0, 2**32 - 1)),
        status=draw(st.sampled_from(Status)),
        reward=draw(st.none() | rewards_of_trajectories),
        reward_components=draw(numbers_by_name),
        turns=tuple(shapes),
        turn_rewards=tuple(draw(exactly(num_turns, floats32))),
        payload_crcs=tuple(draw(exactly(num_turns, crcs))),
        anchors=draw(_turn_anchors(num_turns)),
        oldest_version=draw(optional_versions),
        newest_version=draw(optional_versions),
        turn_versions=draw(_turn_versions(shapes)),
        num_payload_bytes=draw(st.integers(0, 2**40)),
        has_logprobs=draw(st.booleans()),
        sampling=draw(numbers_by_name),
        tags=draw(texts_by_name),
        metrics=draw(numbers_by_name),
        awaits_reward=draw(st.booleans()),
    )


@st.composite
def openings(draw: st.DrawFn) -> GroupOpened:
    num_samples = draw(st.integers(1, 64))
    return GroupOpened(
        group_id=draw(names),
        prompt_uid=draw(st.text(max_size=8)),
        num_samples=num_samples,
        num_needed=draw(st.integers(1, num_samples)),
        purpose=draw(st.sampled_from(Purpose)),
    )


def _turn_anchors(num_turns: int) -> st.SearchStrategy[tuple[int | None, ...]]:
    """One value per turn; an empty tuple if no turn has one."""
    return exactly(num_turns, anchors).map(
        lambda own: () if all(each is None for each in own) else tuple(own)
    )


@st.composite
def _turn_versions(
    draw: st.DrawFn, shapes: Sequence[TurnShape]
) -> tuple[tuple[VersionRun, ...], ...]:
    """Up to two versions per turn that sampled its trained tokens; or none at all."""
    if not draw(st.booleans()) or not any(shape.num_trained_tokens for shape in shapes):
        return ()
    return tuple(tuple(_split(draw, shape.num_trained_tokens)) for shape in shapes)


def _split(draw: st.DrawFn, num_tokens: int) -> Iterator[VersionRun]:
    first = draw(st.integers(0, num_tokens))
    names = draw(st.tuples(optional_versions, versions))
    for version, count in zip(names, (first, num_tokens - first), strict=True):
        if count:
            yield VersionRun(version, count)


_text = st.text(max_size=8)
_FIELDS: Final[dict[str, st.SearchStrategy[Any]]] = {
    "awaited": st.none() | keys,
    "dead": st.lists(keys, max_size=3).map(tuple),
    "group_id": names,
    "key": keys,
    "leftover": st.sampled_from(["short", "carry", "drop"]),
    "lineage": names,
    "num_refills": st.integers(0, 9),
    "number": st.integers(1, 9),
    "reason": _text,
    "revision": st.integers(2, 99),
    "reward": st.none() | rewards_of_trajectories,
    "reward_components": numbers_by_name,
    "step": st.integers(1, 2**40),
    "version": versions,
    "weights_uri": _text,
}
"""Values of the fields of events, by the name of the field."""


def events() -> st.SearchStrategy[Event]:
    """Any event; those without a strategy of their own have any values of their fields."""
    own: dict[Any, Any] = {GroupOpened: openings(), SealedTrajectory: sealed_trajectories()}
    found: list[st.SearchStrategy[Any]] = [
        own[each]
        if each in own
        else st.builds(each, **{f.name: _FIELDS[f.name] for f in fields(each)})
        for each in get_args(Event)
    ]
    return st.one_of(found)


@st.composite
def group_filters(draw: st.DrawFn) -> GroupFilter:
    """Return any filter by the reward, a metric or a component."""
    numbers: dict[str, Any] = draw(
        st.just({})
        | st.fixed_dictionaries({"metric": names})
        | st.fixed_dictionaries({"component": names})
    )
    if draw(st.booleans()):
        return GroupFilter(kind="zero_variance", **numbers)
    low, high = sorted(draw(st.tuples(st.floats(-9, 9), st.floats(-9, 9))))
    bounds = draw(st.sampled_from([(low, high), (low, None), (None, high)]))
    return GroupFilter(kind="mean_range", low=bounds[0], high=bounds[1], **numbers)


_SETTINGS: Final = get_type_hints(BatchingConfig)


@st.composite
def configs(draw: st.DrawFn) -> BatchingConfig:
    """Any configuration that can work."""

    def any_of(setting: str) -> Any:
        return draw(st.sampled_from(get_args(_SETTINGS[setting])))

    mini_batch_groups = draw(st.integers(1, 8))
    aggregation, estimator = any_of("aggregation"), any_of("estimator")
    weights = st.dictionaries(names, st.floats(-9, 9), min_size=2, max_size=3).filter(
        lambda drawn: any(drawn.values())
    )
    max_staleness = draw(st.integers(0, 4))
    merge = estimator == "gae" or draw(st.booleans())
    limit = draw(st.integers(0, 100_000))
    cost = any_of("micro_batch_cost")
    overlong_length = draw(st.integers(0, 9))
    takes_penalty = estimator not in ("gdpo", "maxrl")
    overlong_buffer = draw(st.integers(0, overlong_length)) if takes_penalty else 0
    takes_length = takes_penalty and estimator != "gae"
    length_reward_weight = draw(st.floats(0, 9)) if takes_length else 0.0
    is_free = estimator not in ("gdpo", "reinforce_pp", "reinforce_pp_baseline", "gae")
    mask_truncated = bool(overlong_length and not overlong_buffer) or draw(st.booleans())
    error_trajectories = any_of("error_trajectories")
    has_masked = mask_truncated or error_trajectories == "mask"
    weights_of_rows: list[Any] = ["per_row"]
    if aggregation.startswith("seq_mean") or aggregation == "constant":
        weights_of_rows.append("per_trajectory")
    if aggregation == "seq_mean_token_mean":
        weights_of_rows.append("rollout_mean")
    batch_groups = mini_batch_groups * draw(st.integers(1, 8))
    packs = limit and cost != "padded"
    free = ("singleton_advantage", "selection", "balance_method", "pass_order")
    return BatchingConfig(
        **{name: any_of(name) for name in (*free, "refill_fallback", "surplus")},
        batch_groups=batch_groups,
        mini_batch_groups=mini_batch_groups,
        estimator=estimator,
        reward_source="outcome" if estimator == "reinforce_pp" else any_of("reward_source"),
        component_weights=tuple(draw(weights).items()) if estimator == "gdpo" else (),
        pass_k=draw(st.integers(2, 1024)) if estimator == "pass_at_k" else 1,
        baseline_weight=draw(st.just("") | names) if estimator == "opo" else "",
        normalize_advantages=any_of("normalize_advantages") if is_free else "none",
        turn_weight=draw(st.floats(0, MAX_TURN_WEIGHT)) if estimator == "gigpo" else 1.0,
        turn_discount=draw(st.floats(0, 1)) if estimator == "gigpo" else 1.0,
        divide_by_std=draw(st.booleans()) if estimator == "gigpo" else True,
        aggregation=aggregation,
        length_constant=draw(st.integers(1, 4096)) if aggregation == "constant" else 0,
        row_weights=draw(st.sampled_from(weights_of_rows)),
        merge=merge,
        overlong_length=overlong_length,
        overlong_buffer=overlong_buffer,
        length_reward_weight=length_reward_weight,
        correct_reward=draw(st.floats(-9, 9)) if length_reward_weight else 1.0,
        mask_truncated=mask_truncated,
        error_trajectories=error_trajectories,
        masked_reward=any_of("masked_reward") if has_masked else "keep",
        group_filters=tuple(draw(st.lists(group_filters(), max_size=2, unique=True))),
        max_staleness=max_staleness,
        max_open_groups=draw(st.sampled_from([0, 64, 1000])),
        max_age_policy=any_of("max_age_policy") if max_staleness else "keep",
        max_planned_ahead=draw(st.integers(0, max_staleness)),
        pad_token_id=draw(st.integers(0, 200_000)),
        max_tokens_per_micro_batch=limit,
        micro_batch_cost=cost,
        cost_per_token=draw(st.floats(0, 9)) if cost == "quadratic" else 1.0,
        cost_per_squared_token=draw(st.floats(0, 1)) if cost == "quadratic" else 0.0,
        over_long="refuse" if limit > 100 and draw(st.booleans()) else "alone",
        packing_method=any_of("packing_method") if packs else "best_fit_decreasing",
        alignment=draw(st.integers(1, 4)),
        passes_multiple_of=draw(st.integers(1, 4)),
        rows_multiple_of=draw(st.integers(1, 4)),
        extra_columns=draw(declared_columns(merge=merge)),
        **_times_and_bounds(draw, batch_groups, any_of("deadline_policy")),
    )


def _times_and_bounds(draw: st.DrawFn, batch_groups: int, policy: str) -> dict[str, Any]:
    return {
        "lease_s": draw(st.floats(0.3, 3600)),
        "takeover_s": draw(st.floats(0, 3600)),
        "group_deadline_s": draw(st.floats(0.001, 1e6)),
        "reward_deadline_s": draw(st.just(0.0) | st.floats(0.001, 1e6)),
        "deadline_policy": policy,
        "max_refills": draw(st.integers(1, 9)) if policy == "refill" else 0,
        "retain_checkpoints": draw(st.integers(1, 9)),
        "max_dead_bytes": draw(st.integers(0, 2**40)),
        "max_bytes": draw(st.just(0) | st.integers(batch_groups * LEAST_GROUP_BYTES, 2**40)),
    }


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any plan of a batch, its mini-batches of one group or more each."""
    cut = draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    planned = [draw(_group_plans()) for _ in range(sum(cut))]
    step = draw(st.integers(1, 2**40))
    return Manifest(
        run=draw(names),
        step=step,
        revision=draw(st.integers(0, 1)),
        lineage=draw(names),
        previous_hash="" if step == 1 else "ab" * 32,
        assembly_version=draw(st.integers(0, 3)),
        config_revision=draw(st.integers(1, 9)),
        last_event_id=f"{draw(st.integers(1, 2**40))}-0",
        groups=tuple(planned),
        mini_batches=tuple(_mini_batch_plans(draw, planned, cut)),
        masked_versions=tuple(sorted(draw(st.sets(versions, max_size=2)))),
        figures=draw(figures),
    )


@st.composite
def _sequence_shapes(draw: st.DrawFn) -> SequenceShape:
    prompt, response = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    first = draw(st.integers(0, 3))
    return SequenceShape(
        turns=tuple(range(first, first + draw(st.integers(1, 3)))),
        prompt_length=prompt,
        num_tokens=prompt + response,
        num_trained_tokens=draw(st.integers(0, response)),
    )


@st.composite
def _trajectory_plans(draw: st.DrawFn) -> TrajectoryPlan:
    sequences = draw(st.lists(_sequence_shapes(), min_size=1, max_size=2))
    num_turns = draw(st.integers(0, 3))
    of_turns = exactly(num_turns, floats32).map(tuple)
    plans = st.builds(
        TrajectoryPlan,
        key=keys,
        status=st.sampled_from(Status),
        reward=rewards_of_trajectories,
        advantage=floats32,
        weights=exactly(len(sequences), floats32).map(tuple),
        num_turn_tokens=st.integers(0, 2**40),
        oldest_version=optional_versions,
        newest_version=optional_versions,
        has_logprobs=st.booleans(),
        sequences=st.just(tuple(sequences)),
        payload_crcs=exactly(num_turns, crcs).map(tuple),
        is_masked=st.booleans(),
        turn_advantages=st.just(()) | of_turns,
    )
    return draw(plans)


def _group_plans() -> st.SearchStrategy[GroupPlan]:
    return st.builds(
        GroupPlan,
        group_id=names,
        prompt_uid=st.text(max_size=3),
        trajectories=st.lists(_trajectory_plans(), min_size=1, max_size=2).map(tuple),
    )


_counts = st.integers(0, 2**40)
_denominators = st.builds(
    Denominators, _counts, _counts, _counts, _counts, st.floats(0, 1e6), _counts
)


def _mini_batch_plans(
    draw: st.DrawFn, planned: Sequence[GroupPlan], cut: Sequence[int]
) -> Iterator[MiniBatchPlan]:
    first_group = 0
    first_row_id = draw(st.integers(0, 2**40))
    for num_groups in cut:
        members = [
            t for g in planned[first_group : first_group + num_groups] for t in g.trajectories
        ]
        num_rows = sum(len(member.sequences) for member in members)
        yield MiniBatchPlan(
            first_group=first_group,
            num_groups=num_groups,
            first_row_id=first_row_id,
            num_rows=num_rows,
            width=draw(st.integers(0, 2**20)),
            response_width=draw(st.integers(0, 2**20)),
            denominators=draw(_denominators),
        )
        first_group += num_groups
        first_row_id += num_rows
