"""Guards of every layout, of the way back from it, and of supervised rows."""

from __future__ import annotations

from mutations.mutation import Mutation

SHAPES = (
    # ----------------------------------------------------------------------------------
    # a line of slots
    Mutation(
        "the value of a first token that nothing scores goes to the second",
        "layouts/slots.py",
        "values.offsets[self._order] + self._is_unscored",
        "values.offsets[self._order]",
        ("test_layouts", "test_layouts"),
    ),
    Mutation(
        "the padding between aligned rows is attended to",
        "layouts/sft.py",
        "    line.place_tokens(is_token, attention_KW.reshape(num_slots))\n",
        "    attention_KW[...] = True\n",
        ("test_sft",),
    ),
    Mutation(
        "an advantage times a mask of 0 is -0.0",
        "layouts/slots.py",
        "np.multiply(mask.view(np.uint8), scalars.view(np.uint32), out=into.view(np.uint32))",
        "np.multiply(mask, scalars, out=into)",
        ("test_left_padded",),
    ),
    # ----------------------------------------------------------------------------------
    # right-padded
    Mutation(
        "a row longer than the rectangle is right-padded into the next",
        "layouts/padded.py",
        "    require_fits(lengths_B, width)\n",
        "",
        ("test_layouts",),
    ),
    Mutation(
        "right padding is token 0",
        "layouts/slots.py",
        "        if pad_token_id:\n            ids[...] = pad_token_id\n",
        "",
        ("test_layouts",),
    ),
    Mutation(
        "right-padded advantages stand on masked tokens",
        "layouts/slots.py",
        "    masked_scalars(advantage, mask, advantages)\n",
        "    advantages[...] = advantage\n",
        ("test_layouts",),
    ),
    # ----------------------------------------------------------------------------------
    # left-padded
    Mutation(
        "a response wider than its columns runs into the row before",
        "layouts/padded.py",
        "    require_fits(rows.loss_mask.lengths, response_width)\n",
        "",
        ("test_left_padded",),
    ),
    Mutation(
        "left padding is token 0",
        "layouts/padded.py",
        "        _fill_left(rows.input_ids.lengths, ids_BT, pad_token_id)\n",
        "        pass\n",
        ("test_left_padded",),
    ),
    # ----------------------------------------------------------------------------------
    # packed
    Mutation(
        "packed columns are not checked",
        "layouts/packed.py",
        "    require_aligned(rows)\n",
        "",
        ("test_checks",),
    ),
    Mutation(
        "every bin counts its slots from the first bin",
        "layouts/packed.py",
        "cu_seqlens=(starts - starts[0])",
        "cu_seqlens=starts",
        ("test_layouts",),
    ),
    Mutation(
        "an alignment of 0 is taken",
        "layouts/packed.py",
        "    if alignment < 1:\n",
        "    if alignment < 0:\n",
        ("test_layouts",),
    ),
    Mutation(
        "more slots than cu_seqlens can count wrap round",
        "layouts/packed.py",
        "if longest > np.iinfo(np.int32).max:",
        "if False:",
        ("test_layouts",),
    ),
    # ----------------------------------------------------------------------------------
    # jagged
    Mutation(
        "jagged columns are not checked",
        "layouts/jagged.py",
        "    require_aligned(rows)\n",
        "",
        ("test_checks",),
    ),
    Mutation(
        "the first token of a row is scored by another row",
        "layouts/jagged.py",
        "(self.prompt_length_B == 0) & (lengths_B > 0)]] = -1",
        "(self.prompt_length_B < 0)]] = -1",
        ("test_layouts",),
    ),
    Mutation(
        "jagged advantages stand on masked tokens",
        "layouts/jagged.py",
        "masked_scalars(rows.advantages.flat().values, mask_M, advantages_M)",
        "advantages_M[:] = rows.advantages.flat().values",
        ("test_layouts",),
    ),
    # ----------------------------------------------------------------------------------
    # outputs
    Mutation(
        "inert rows give values",
        "layouts/outputs.py",
        "        if row_id >= 0:  #",
        "        if True:  #",
        ("test_outputs",),
    ),
    Mutation(
        "a first token that nothing scored has the value of another",
        "layouts/outputs.py",
        "np.flatnonzero((prompts_B == 0) & (lengths_B > 0))",
        "np.flatnonzero(prompts_B < 0)",
        ("test_outputs",),
    ),
    Mutation(
        "a row without values is left out",
        "layouts/outputs.py",
        "        if values is None:\n            raise",
        "        if values is None:\n            continue\n            raise",
        ("test_outputs",),
    ),
    Mutation(
        "fewer values than response tokens are joined",
        "layouts/outputs.py",
        "        if len(values) != length:\n",
        "        if False:\n",
        ("test_outputs",),
    ),
    Mutation(
        "values of rows that are not here are dropped",
        "layouts/outputs.py",
        "    if found:\n        raise",
        "    if False:\n        raise",
        ("test_outputs",),
    ),
    Mutation(
        "inert rows have one number where others have several",
        "layouts/outputs.py",
        "np.zeros((length, *shape), dtype) if is_inert",
        "np.zeros(length, dtype) if is_inert",
        ("test_outputs",),
    ),
    Mutation(
        "values of other rows are cut",
        "layouts/outputs.py",
        "    if num_rows != len(row_ids):",
        "    if False:",
        ("test_outputs",),
    ),
    Mutation(
        "a response longer than the values is cut off",
        "layouts/outputs.py",
        "    require_fits(lengths_B, width)\n",
        "",
        ("test_outputs",),
    ),
    Mutation(
        "values of another bin are cut",
        "layouts/outputs.py",
        "    if len(values_N) != num_slots:\n",
        "    if False:\n",
        ("test_outputs",),
    ),
    Mutation(
        "values of other tokens are cut",
        "layouts/outputs.py",
        "    if len(values_M) != offsets[-1]:",
        "    if False:",
        ("test_outputs",),
    ),
    # ----------------------------------------------------------------------------------
    # supervised rows
    Mutation(
        "weights of other sequences are taken",
        "layouts/sft.py",
        "    if len(found_B) != len(lengths_B):\n",
        "    if False:\n",
        ("test_sft",),
    ),
    Mutation(
        "a sequence without tokens is taken",
        "layouts/sft.py",
        "    if lengths_B.min(initial=1) < 1:\n",
        "    if False:\n",
        ("test_sft",),
    ),
    Mutation(
        "fewer weights than tokens are taken",
        "layouts/sft.py",
        "    if not np.array_equal(found_B, lengths_B):\n",
        "    if False:\n",
        ("test_sft",),
    ),
    Mutation(
        "a weight that is no number is taken",
        "layouts/sft.py",
        "    if len(places):\n",
        "    if False:\n",
        ("test_sft",),
    ),
    Mutation(
        "a weight that float32 cannot hold is taken",
        "layouts/sft.py",
        "np.abs(token_weights.values) <= np.finfo(np.float32).max",
        "~np.isnan(token_weights.values)",
        ("test_sft",),
    ),
    Mutation(
        "the first token is a target",
        "layouts/sft.py",
        "is_target_N[starts_B] = False",
        "pass",
        ("test_sft",),
    ),
    Mutation(
        "a row of little weight is blown up",
        "layouts/sft.py",
        "np.maximum(row_sums(weights, np.float64), 1.0)",
        "np.maximum(row_sums(weights, np.float64), 1e-9)",
        ("test_sft",),
    ),
    Mutation(
        "a batch of little weight is blown up",
        "layouts/sft.py",
        "max(values.sum(dtype=np.float64), 1.0)",
        "max(values.sum(dtype=np.float64), 1e-9)",
        ("test_sft",),
    ),
    Mutation(
        "own targets are scaled by those of all sequences",
        "layouts/sft.py",
        'if loss_scale == "own_targets":',
        "if False:",
        ("test_sft",),
    ),
    Mutation(
        "all targets are scaled by those of the first sequence",
        "layouts/sft.py",
        "values.sum(dtype=np.float64)",
        "weights[0].sum(dtype=np.float64)",
        ("test_sft",),
    ),
    Mutation(
        "targets are not scaled",
        "layouts/sft.py",
        "Ragged(values * scale, mask.offsets)",
        "weights",
        ("test_sft",),
    ),
    Mutation(
        "weights of masked tokens count",
        "layouts/sft.py",
        "rows.token_weights.flat().values * mask.values",
        "rows.token_weights.flat().values",
        ("test_sft",),
    ),
    Mutation(
        "bins are laid out in the order of packing",
        "layouts/sft.py",
        "for k in range(dp_rank, len(bins), dp_world_size)",
        "for k in range(dp_rank, len(bins), max(dp_world_size - 1, 1))",
        ("test_sft",),
    ),
    Mutation(
        "supervised bins count unaligned lengths",
        "layouts/sft.py",
        "over_long=over_long, alignment=alignment)",
        "over_long=over_long)",
        ("test_sft",),
    ),
    Mutation(
        "supervised columns are not checked",
        "layouts/sft.py",
        "    require_aligned(rows)\n",
        "",
        ("test_sft",),
    ),
    Mutation(
        "whole numbers say nothing where there is no prompt",
        "layouts/outputs.py",
        'if line.dtype.kind != "f":',
        "if False:",
        ("test_outputs",),
    ),
)
