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
        ("test_merge",),
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
        "if _kind(other) != _kind(first):",
        "if False:",
        ("test_joining",),
    ),
    Mutation(
        "inert rows of operations get a weight",
        "rows/plain_rows.py",
        "values = np.zeros((num_rows * count",
        "values = np.ones((num_rows * count",
        ("test_joining",),
    ),
    Mutation(
        "inert rows of operations are of another request",
        "rows/plain_rows.py",
        'request_id=[""] * num_rows',
        'request_id=["?"] * num_rows',
        ("test_joining",),
    ),
    Mutation(
        "a slice is joined with what stands before it",
        "rows/assemble.py",
        "column.flat().values for column in columns",
        "column.values for column in columns",
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
        "merge/storing.py",
        "if largest <= np.iinfo(dtype).max:",
        "if largest <= 2 * np.iinfo(dtype).max + 1:",
        ("test_extras",),
    ),
    Mutation(
        "an expert that int32 cannot hold is taken",
        "merge/storing.py",
        '    raise InvalidTurnError(field, f"expert {largest}',
        '    return choices.astype(np.int32)\n    raise InvalidTurnError(field, f"expert {largest}',
        ("test_extras",),
    ),
    Mutation(
        "the dummy route names one expert several times",
        "layouts/slots.py",
        "found[...] = np.arange(column.shape[-1])",
        "found[...] = 0",
        ("test_extra_layouts",),
    ),
    Mutation(
        "a negative expert is stored as another",
        "merge/storing.py",
        "    if smallest < 0:\n",
        "    if False:\n",
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
        "if into.dtype == np.uint8 and into.max(initial=0) > 1:",
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
        ("test_extras_laws",),
    ),
    Mutation(
        "choices of tokens that are not shared are taken over",
        "merge/storing.py",
        "num_shared = min(known, match.shared_tokens)",
        "num_shared = known",
        ("test_extras",),
    ),
    Mutation(
        "a turn without tokens lacks a value per token",
        "merge/merged_extras.py",
        "if count != 0 and",
        "if",
        ("test_extras_laws",),
    ),
)
