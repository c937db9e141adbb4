"""Guards of what is in a column: types, optional columns, router choices."""

from __future__ import annotations

from mutations.mutation import Mutation

COLUMNS = (
    # ----------------------------------------------------------------------------------
    # types of columns, and values in them
    Mutation(
        "a column of another type is laid out bit by bit",
        "layouts/slots.py",
        "        if column.values.dtype != dtype:\n",
        "        if False:\n",
        ("test_checks",),
    ),
    Mutation(
        "advantages of another type are laid out bit by bit",
        "layouts/slots.py",
        "if rows.advantage.dtype != _FLOAT32:",
        "if False:",
        ("test_checks",),
    ),
    Mutation(
        "a mask of 2 is laid out",
        "layouts/slots.py",
        "if rows.loss_mask.values.max(initial=0) > 1:",
        "if False:",
        ("test_checks",),
    ),
    Mutation(
        "a prompt longer than its row is laid out",
        "layouts/slots.py",
        "rows.prompt_length.min(initial=0) < 0 or lengths_B.min(initial=0) < 0",
        "False",
        ("test_checks",),
    ),
    Mutation(
        "a column of fewer rows is laid out",
        "layouts/slots.py",
        "if len(found_B) != len(lengths_B):",
        "if False:",
        ("test_checks",),
    ),
    Mutation(
        "token ids of another type share no beginning",
        "merge/prefix.py",
        "if token_ids.dtype != _INT32:",
        "if False:",
        ("test_prefix",),
    ),
    Mutation(
        "more tokens than offsets can count wrap round",
        "merge/buffers.py",
        "if bounds[-1] > np.iinfo(np.int32).max:",
        "if False:",
        ("test_columns",),
    ),
    # ----------------------------------------------------------------------------------
    # optional columns of several parts
    Mutation(
        "joined offsets wrap round",
        "merge/buffers.py",
        "if bounds[-1] > np.iinfo(np.int32).max:",
        "if False:",
        ("test_joining",),
    ),
    Mutation(
        "a real row without operations passes for an inert one",
        "rows/assemble.py",
        '    if len(real):\n        raise BatchingError(f"row {part',
        '    if False:\n        raise BatchingError(f"row {part',
        ("test_joining",),
    ),
    Mutation(
        "targets of different shapes are joined",
        "rows/assemble.py",
        "if own.target_ids.values.shape[1:] != shape:",
        "if False:",
        ("test_joining",),
    ),
    Mutation(
        "extra columns of different declarations are joined",
        "rows/assemble.py",
        "if _declaration(own) != _declaration(known):",
        "if False:",
        ("test_joining",),
    ),
    Mutation(
        "inert rows of operations get a weight",
        "rows/assemble.py",
        "target_weights=Ragged(np.zeros((offsets[-1], *shape), np.float32), offsets)",
        "target_weights=Ragged(np.ones((offsets[-1], *shape), np.float32), offsets)",
        ("test_joining",),
    ),
    Mutation(
        "inert rows of operations are of another request",
        "rows/assemble.py",
        'request_id=[""] * len(part)',
        'request_id=["?"] * len(part)',
        ("test_joining",),
    ),
    Mutation(
        "a slice is joined with what stands before it",
        "rows/assemble.py",
        "column.values[column.offsets[0] : column.offsets[-1]]",
        "column.values[: column.offsets[-1]]",
        ("test_joining", "test_assemble"),
    ),
    Mutation(
        "rows without advantages per token get none",
        "rows/assemble.py",
        "np.where(trained, per_token, np.float32(0)), mask",
        "np.zeros_like(per_token), mask",
        ("test_joining",),
    ),
    Mutation(
        "rows without weights per token weigh something where they are masked",
        "rows/assemble.py",
        "Ragged(rows.loss_mask.values.astype(np.float32), rows",
        "Ragged(np.ones_like(rows.loss_mask.values, np.float32), rows",
        ("test_joining",),
    ),
    Mutation(
        "no part at all makes rows",
        "rows/assemble.py",
        "    if not parts:\n",
        "    if False:\n",
        ("test_planning",),
    ),
    # ----------------------------------------------------------------------------------
    # router choices
    Mutation(
        "an expert that int16 cannot hold becomes negative",
        "merge/merged_extras.py",
        "(1 << 15, np.int16)",
        "(1 << 16, np.int16)",
        ("test_routes",),
    ),
    Mutation(
        "an expert that int32 cannot hold is taken",
        "merge/merged_extras.py",
        "    if dtype is None:\n",
        "    if dtype is None and False:\n",
        ("test_routes",),
    ),
    Mutation(
        "the dummy route names one expert several times",
        "merge/merged_extras.py",
        "np.arange(shape[-1], dtype=dtype)",
        "np.zeros(shape[-1], dtype=dtype)",
        ("test_routes",),
    ),
    Mutation(
        "a negative expert is stored as another",
        "merge/merged_extras.py",
        "    if smallest < 0:\n        raise InvalidTurnError",
        "    if False:\n        raise InvalidTurnError",
        ("test_extras",),
    ),
    Mutation(
        "version runs may cover less than a response",
        "merge/columns.py",
        "if own and (covered := sum([length for _, length in own])) != count:",
        "if own and (covered := 0):",
        ("test_merge",),
    ),
    Mutation(
        "a mask of 2 is a mask",
        "merge/columns.py",
        "if into.max(initial=0) > 1:",
        "if False:",
        ("test_merge",),
    ),
    Mutation(
        "a reward that float32 cannot hold becomes infinite",
        "merge/columns.py",
        'np.errstate(over="raise")',
        'np.errstate(over="ignore")',
        ("test_merge",),
    ),
    Mutation(
        "values behind int32 offsets wrap round",
        "merge/buffers.py",
        "if bounds[-1] > np.iinfo(np.int32).max:",
        "if False:",
        ("test_merged_extras",),
    ),
    Mutation(
        "choices of tokens that are not shared are taken over",
        "merge/extras.py",
        "return min(known, match.shared_tokens)",
        "return known",
        ("test_extras",),
    ),
    Mutation(
        "a turn without tokens lacks a value per token",
        "merge/merged_extras.py",
        '        "token": turn.shared_tokens + len(turn.token_ids),\n',
        "",
        ("test_merged_extras",),
    ),
)
