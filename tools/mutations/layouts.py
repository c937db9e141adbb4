"""Guards of where tokens stand: layouts, bins, parts and passes."""

from __future__ import annotations

from mutations.mutation import Mutation

LAYOUTS = (
    # ----------------------------------------------------------------------------------
    # layouts
    Mutation(
        "a row longer than the rectangle runs into its neighbour",
        "layouts/padded.py",
        "    require_fits(rows.input_ids.lengths, width)\n",
        "",
        ("test_left_padded",),
    ),
    Mutation(
        "short rows are taken from the beginning of a larger column",
        "layouts/padded.py",
        "= values.values[bounds[0] : bounds[-1]]",
        "= values.values[: bounds[-1] - bounds[0]]",
        ("test_left_padded",),
    ),
    Mutation(
        "a mask of more columns than int16 counts wraps round",
        "layouts/padded.py",
        "np.int16 if width <= np.iinfo(np.int16).max else np.int32",
        "np.int16 if width <= np.iinfo(np.int16).max + 1 else np.int32",
        ("test_left_padded",),
    ),
    Mutation(
        "long rows end one column early",
        "layouts/padded.py",
        "(ends_B - values.lengths).tolist()",
        "(ends_B - values.lengths - 1).tolist()",
        ("test_left_padded",),
    ),
    Mutation(
        "positions on the padding are negative",
        "layouts/padded.py",
        "return np.maximum(columns_T - num_padding_B[:, None], 0)",
        "return columns_T - num_padding_B[:, None]",
        ("test_left_padded",),
    ),
    Mutation(
        "what belongs to a token stands in its own slot",
        "layouts/slots.py",
        "np.maximum(prompts - 1, 0)",
        "np.maximum(prompts, 0)",
        ("test_layouts", "test_layouts"),
    ),
    Mutation(
        "a trained token that nothing scores is lost silently",
        "layouts/slots.py",
        "    if len(trained):",
        "    if False:",
        ("test_checks", "test_layouts"),
    ),
    Mutation(
        "packed rows begin anywhere",
        "layouts/packed.py",
        "// alignment) * alignment",
        "// 1) * 1",
        ("test_layouts",),
    ),
    Mutation(
        "a column shorter than its responses is laid out",
        "layouts/slots.py",
        "if not np.array_equal(found_B, lengths_B):",
        "if False:",
        ("test_checks",),
    ),
    Mutation(
        "values of a row that comes twice are overwritten",
        "layouts/outputs.py",
        "if row_id in to:",
        "if False:",
        ("test_outputs",),
    ),
    # ----------------------------------------------------------------------------------
    # packing and balance
    Mutation(
        "best fit takes a bin with room for all but one token",
        "packing/bins.py",
        "bisect.bisect_left(spaces, (size, -1))",
        "bisect.bisect_left(spaces, (size - 1, -1))",
        ("test_packing",),
    ),
    Mutation(
        "a row above the capacity is not refused",
        "packing/bins.py",
        'elif over_long == "refuse":',
        "elif False:",
        ("test_packing",),
    ),
    Mutation(
        "capacity forgets the alignment",
        "packing/bins.py",
        "sizes = [-(-int(length) // alignment) * alignment for length",
        "sizes = [int(length) for length",
        ("test_packing",),
    ),
    Mutation(
        "ties depend on the order of sorting",
        "packing/bins.py",
        "lower_first = sorted(rows)",
        "lower_first = sorted(rows, reverse=True)",
        ("test_packing",),
    ),
    Mutation(
        "a pass takes one row more than its budget",
        "packing/microbatch.py",
        "(len(passes[-1]) + 1) * aligned[row]",
        "len(passes[-1]) * aligned[row]",
        ("test_microbatch",),
    ),
    Mutation(
        "equal counts are promised where they cannot be",
        "packing/balance.py",
        "if equal_count and len(weights) % num_parts:",
        "if False:",
        ("test_balance",),
    ),
    Mutation(
        "auto takes the worse of both methods",
        "packing/balance.py",
        "return min(greedy, differenced,",
        "return max(greedy, differenced,",
        ("test_balance",),
    ),
    Mutation(
        "Karmarkar-Karp adds heavy sets to heavy ones",
        "packing/balance.py",
        "reversed(second)",
        "second",
        ("test_balance",),
    ),
)
