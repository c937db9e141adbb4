"""Guards of what differs from turn to turn: anchors, and the advantages that they decide."""

from __future__ import annotations

from mutations.mutation import Mutation

_BY_TURN = ("test_turn_advantages",)

TURNS = (
    # ----------------------------------------------------------------------------------
    # anchors
    Mutation(
        "an anchor has more than 64 bits",
        "merge/storing.py",
        "limit=2 ** (8 * _NUM_ANCHOR_BYTES)",
        "limit=2 ** (16 * _NUM_ANCHOR_BYTES)",
        ("test_turn_advantages",),
    ),
    Mutation(
        "an anchor is read in the order of this machine",
        "merge/storing.py",
        '[:_NUM_ANCHOR_BYTES], "big")',
        '[:_NUM_ANCHOR_BYTES], "little")',
        ("test_turn_advantages",),
    ),
    Mutation(
        "a member needs no anchor",
        "scoring/rewards.py",
        "        if anchor is None:",
        "        if False:",
        _BY_TURN,
    ),
    # ----------------------------------------------------------------------------------
    # advantages
    Mutation(
        "a turn is compared with turns of other states",
        "scoring/advantages.py",
        "places.setdefault(state, [])",
        "places.setdefault(0, [])",
        _BY_TURN,
    ),
    Mutation(
        "a state that was seen once is compared with itself",
        "scoring/advantages.py",
        "        if len(positions) > 1:\n",
        "        if len(positions) > 0:\n",
        ("test_advantages",),
    ),
    Mutation(
        "the only trajectory of a group gets what the run does not say",
        "planning/plan_batch.py",
        "        singleton=config.singleton_advantage,\n    )\n\n\ndef",
        "    )\n\n\ndef",
        _BY_TURN,
    ),
    Mutation(
        "a turn counts later rewards in full",
        "planning/plan_batch.py",
        "gamma=config.turn_discount",
        "gamma=1.0",
        _BY_TURN,
    ),
    Mutation(
        "turns weigh what the run does not say",
        "planning/plan_batch.py",
        "turn_weight=config.turn_weight",
        "turn_weight=1.0",
        _BY_TURN,
    ),
    Mutation(
        "the part of the trajectory is divided though the run says no",
        "planning/plan_batch.py",
        "        divide_by_std=config.divide_by_std,\n        pass_k",
        "        pass_k",
        _BY_TURN,
    ),
    Mutation(
        "the part of the turn is divided though the run says no",
        "planning/plan_batch.py",
        "        divide_by_std=config.divide_by_std,\n        singleton",
        "        singleton",
        _BY_TURN,
    ),
    Mutation(
        "a trajectory that is left out has an advantage of one turn",
        "planning/plan_batch.py",
        "(0.0,) * len(member.sealed.turns)",
        "(0.0,)",
        _BY_TURN,
    ),
    Mutation(
        "the penalty of a long response is in no turn",
        "scoring/rewards.py",
        "[*before, last + length_penalty(trajectory, config)]",
        "[*before, last]",
        ("test_rewards",),
    ),
    Mutation(
        "the reward of a turn leaves float32",
        "scoring/rewards.py",
        "        if not abs(reward) <= MAX_REWARD:",
        "        if False:",
        _BY_TURN,
    ),
    Mutation(
        "turns that differ are filtered for their equal rewards",
        "scoring/group_filters.py",
        " and not _turns_differ(compared, config)",
        "",
        _BY_TURN,
    ),
    Mutation(
        "turns that weigh nothing keep a group",
        "scoring/group_filters.py",
        " or not config.turn_weight",
        "",
        _BY_TURN,
    ),
    Mutation(
        "a setting that no estimator reads passes",
        "config/rules.py",
        "if chosen != reader and value != unread:",
        "if False:",
        ("test_config",),
    ),
    # ----------------------------------------------------------------------------------
    # their tokens
    Mutation(
        "a turn has the advantage of its place in the row",
        "rows/assemble.py",
        "        for turn in row.turns\n    ]",
        "        for turn in range(len(row.turns))\n    ]",
        _BY_TURN,
    ),
    Mutation(
        "a row begins where the one before ended",
        "scoring/advantages.py",
        "    counts_N[first] = ends.values[first]\n",
        "",
        _BY_TURN,
    ),
    Mutation(
        "a masked token has the advantage of its turn",
        "rows/assemble.py",
        "        loss_mask=columns.loss_mask,\n    )\n\n\ndef _group_totals",
        "        loss_mask=Ragged(\n"
        "            np.ones_like(columns.loss_mask.values), columns.loss_mask.offsets\n"
        "        ),\n    )\n\n\ndef _group_totals",
        _BY_TURN,
    ),
    Mutation(
        "a plan may have advantages of fewer turns",
        "manifests.py",
        "    if len(plan.turn_advantages) not in (0, len(plan.payload_crcs)):",
        "    if False:",
        ("test_manifests",),
        "records",
    ),
)
