"""Guards of what becomes a row, and of whose it is: merge, readiness, plan, mini-batches."""

from __future__ import annotations

from mutations.mutation import Mutation

ROWS = (
    # ----------------------------------------------------------------------------------
    # merging
    Mutation(
        "a plan merges turns whose context was edited",
        "merge.py",
        "row is not None and shape.shared_tokens == num_tokens[parent]",
        "row is not None",
        ("test_merge",),
    ),
    Mutation(
        "merging joins turns whose context was edited",
        "merge.py",
        "place is not None and shared == num_tokens[parent]",
        "place is not None",
        ("test_merge",),
    ),
    Mutation(
        "a second branch goes on in the row of the first",
        "merge.py",
        "            del row_ending_in[parent]\n        else:\n            row = ",
        "            pass\n        else:\n            row = ",
        ("test_merge",),
    ),
    Mutation(
        "splitting gives a turn log-probabilities that it never had",
        "merge.py",
        "return None if np.isnan(logprobs).any() else logprobs",
        "return logprobs",
        ("test_merge",),
    ),
    Mutation(
        "tokens observed between two turns are trained",
        "columns.py",
        "np.tile(np.array([0, 1], np.uint8)",
        "np.tile(np.array([1, 1], np.uint8)",
        ("test_merge",),
    ),
    Mutation(
        "an array shorter than its response is taken",
        "columns.py",
        "if len(array) != count:",
        "if len(array) > count:",
        ("test_merge",),
    ),
    Mutation(
        "a turn takes more tokens than its parent has",
        "columns.py",
        "if own > len(turn.token_ids):",
        "if False:",
        ("test_merge",),
    ),
    Mutation(
        "a turn without log-probabilities beside others gets zeros",
        "columns.py",
        "unknown = np.full(count, np.nan, np.float32)",
        "unknown = np.zeros(count, np.float32)",
        ("test_merge",),
    ),
    # ----------------------------------------------------------------------------------
    # finding prefixes
    Mutation(
        "a prompt that is longer than what is known counts as going on",
        "prefix.py",
        "if tokens.startswith(tail, known * _TOKEN_BYTES):",
        "if tail:",
        ("test_prefix",),
    ),
    Mutation(
        "a turn that ends there is not preferred",
        "prefix.py",
        "if ending is not None:",
        "if False:",
        ("test_prefix",),
    ),
    Mutation(
        "of the turns that end there the last is named",
        "prefix.py",
        "line.ends.setdefault(offset, turn)",
        "line.ends[offset] = turn",
        ("test_prefix",),
    ),
    Mutation(
        "a response that repeats another is not found",
        "prefix.py",
        "line, offset, known = _walk(line, offset, own)",
        "known = 0",
        ("test_prefix",),
    ),
    # ----------------------------------------------------------------------------------
    # readiness
    Mutation(
        "a group is ready one sample early",
        "readiness.py",
        "if len(group.samples) < num_samples:",
        "if len(group.samples) < num_samples - 1:",
        ("test_readiness",),
    ),
    Mutation(
        "a group that was decided opens again",
        "readiness.py",
        "event.group_id in self._open or event.group_id in self._decided",
        "event.group_id in self._open",
        ("test_readiness",),
    ),
    Mutation(
        "another attempt replaces a sealed sample",
        "readiness.py",
        "if group.samples.get(key.sample) is not None:",
        "if False:",
        ("test_readiness",),
    ),
    Mutation(
        "a seal that is heard twice is dropped as surplus",
        "readiness.py",
        "        if key in group.seen:\n",
        "        if False:\n",
        ("test_readiness",),
    ),
    Mutation(
        "the last living member of a group is trained alone",
        "readiness.py",
        "needed=min(2, num_samples)",
        "needed=1",
        ("test_readiness",),
    ),
    Mutation(
        "members are in the order of their seals",
        "readiness.py",
        "in sorted(group.samples.items())",
        "in group.samples.items()",
        ("test_readiness",),
    ),
    Mutation(
        "groups without signal are dropped unasked",
        "readiness.py",
        "if self._config.drop_zero_variance and _teaches",
        "if _teaches",
        ("test_readiness",),
    ),
    # ----------------------------------------------------------------------------------
    # planning and assembling
    Mutation(
        "a short batch is planned while more groups may come",
        "planning.py",
        "return num_ready if is_final else 0",
        "return num_ready",
        ("test_planning",),
    ),
    Mutation(
        "event ids are compared as text",
        "planning.py",
        "for group in ready), key=_event_order)",
        "for group in ready))",
        ("test_planning",),
    ),
    Mutation(
        "row ids of two mini-batches overlap",
        "planning.py",
        "first_row_id += len(rows)",
        "first_row_id += len(part)",
        ("test_planning",),
    ),
    Mutation(
        "a payload of other checksums is assembled",
        "assemble.py",
        "if found != trajectory.payload_crcs:",
        "if len(found) != len(trajectory.payload_crcs):",
        ("test_assemble",),
    ),
    Mutation(
        "rows of other lengths than planned are assembled",
        "assemble.py",
        "if found != row[1:]:",
        "if False:",
        ("test_assemble",),
    ),
    Mutation(
        "rows without log-probabilities beside others get zeros",
        "assemble.py",
        "missing = np.where(rows.loss_mask.values, np.float32(np.nan), np.float32(0))",
        "missing = np.zeros(len(rows.loss_mask.values), np.float32)",
        ("test_assemble",),
    ),
    # ----------------------------------------------------------------------------------
    # mini-batches
    Mutation(
        "inert rows get a live mask",
        "minibatch.py",
        '"loss_mask": ragged(0, np.uint8)',
        '"loss_mask": ragged(1, np.uint8)',
        ("test_minibatch",),
    ),
    Mutation(
        "inert rows weigh as much as others",
        "minibatch.py",
        '"weight": (0.0, np.float32)',
        '"weight": (1.0, np.float32)',
        ("test_minibatch",),
    ),
    Mutation(
        "inert rows pass for real ones",
        "minibatch.py",
        '"is_padding": (True, np.bool_)',
        '"is_padding": (False, np.bool_)',
        ("test_minibatch",),
    ),
    Mutation(
        "two inert rows have one id",
        "minibatch.py",
        "<< _POSITION_BITS) | position)",
        "<< _POSITION_BITS))",
        ("test_minibatch",),
    ),
    Mutation(
        "rows divide by the largest size instead of all of them",
        "minibatch.py",
        "return math.lcm(*declared)",
        "return max(declared)",
        ("test_minibatch_sizes",),
    ),
    Mutation(
        "the lightest rank gets more rows than the others",
        "minibatch.py",
        "if len(ranks[dp_rank]) < rows_per_rank:",
        "if True:",
        ("test_minibatch",),
    ),
    Mutation(
        "inert rows are still there after the shares are joined",
        "minibatch.py",
        "real = np.flatnonzero(~together.is_padding)",
        "real = np.arange(len(together))",
        ("test_minibatch_sizes",),
    ),
    Mutation(
        "a row in two shares is kept twice",
        "minibatch.py",
        "if len(twice):",
        "if False:",
        ("test_minibatch_sizes",),
    ),
)
