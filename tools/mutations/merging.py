"""Guards of merging: the row that a turn extends, and values that are copied together."""

from __future__ import annotations

from mutations.mutation import Mutation

MERGING = (
    # ----------------------------------------------------------------------------------
    # merging
    Mutation(
        "a plan merges turns whose context was edited",
        "merge/merging.py",
        "row is not None and shape.shared_tokens == num_tokens[parent]",
        "row is not None",
        ("test_merge",),
    ),
    Mutation(
        "a second branch goes on in the row of the first",
        "merge/merging.py",
        "            del row_ending_in[parent]\n        else:\n            row = ",
        "            pass\n        else:\n            row = ",
        ("test_merge",),
    ),
    Mutation(
        "tokens observed between two turns are trained",
        "merge/columns.py",
        "np.tile(np.array([False, True])",
        "np.tile(np.array([True, True])",
        ("test_merge",),
    ),
    Mutation(
        "an array shorter than its response is taken",
        "merge/columns.py",
        "if (found := [*map(len, arrays)]) != counts:",
        "if (found := [*map(len, arrays)]) > counts:",
        ("test_merge",),
    ),
    Mutation(
        "a version run goes on in the next row",
        "merge/columns.py",
        "(version_N[1:] != version_N[:-1]) | (row_N[1:] != row_N[:-1])",
        "version_N[1:] != version_N[:-1]",
        ("test_merge",),
    ),
    Mutation(
        "a turn takes more tokens than its parent has",
        "merge/columns.py",
        "        if num_own > len(values):\n",
        "        if False:\n",
        ("test_merge",),
    ),
    Mutation(
        "a turn without log-probabilities beside others gets zeros",
        "merge/columns.py",
        "unknown = np.full(count, np.nan, np.float32)",
        "unknown = np.zeros(count, np.float32)",
        ("test_merge",),
    ),
    # ----------------------------------------------------------------------------------
    # finding prefixes
    Mutation(
        "a prompt that ends before what is known counts as going on",
        "merge/prefix.py",
        "return length <= len(prompt) and self.tokens.startswith(prompt[:length])",
        "return self.tokens.startswith(prompt[:length])",
        ("test_prefix",),
    ),
    Mutation(
        "a prompt that leaves the last turn inside goes on behind it",
        "merge/prefix.py",
        "if 0 < end == line.length and line.depth == 0 and line.begins(prompt):",
        "if end and line.depth == 0 and line.begins(prompt):",
        ("test_prefix",),
    ),
    Mutation(
        "a turn that ends there is not preferred",
        "merge/prefix.py",
        "if ending is not None:",
        "if False:",
        ("test_prefix",),
    ),
    Mutation(
        "of the turns that end there the last is named",
        "merge/prefix.py",
        "self.ends.setdefault(offset, turn)",
        "self.ends[offset] = turn",
        ("test_prefix",),
    ),
    Mutation(
        "a response that repeats another is not found",
        "merge/prefix.py",
        "line, offset, known = self._walk(line, offset, response)",
        "known = 0",
        ("test_prefix",),
    ),
    Mutation(
        "a row that goes on is named again",
        "merge/prefix.py",
        "            del self.rows[place]\n",
        "            pass\n",
        ("test_prefix",),
    ),
    Mutation(
        "of equal rows the oldest is named",
        "merge/prefix.py",
        "for place in reversed(range(bisect.bisect_left(line.rows, (offset + 1,)))):",
        "for place in range(bisect.bisect_left(line.rows, (offset + 1,))):",
        ("test_prefix",),
    ),
    Mutation(
        "a longer beginning hides a row that the prompt holds whole",
        "merge/prefix.py",
        "        yield from line.open_rows(offset)\n",
        "",
        ("test_prefix",),
    ),
    Mutation(
        "a turn that names less of another than it holds takes its row",
        "merge/prefix.py",
        "if match.shared_tokens == parent_line.depth + end:",
        "if True:",
        ("test_prefix",),
    ),
    Mutation(
        "tokens behind a row that goes on are written again",
        "merge/prefix.py",
        "line, offset, known = self._walk(*self._locate(match), new_ids)",
        "line, offset, known = *self._locate(match), 0",
        ("test_prefix",),
    ),
    Mutation(
        "a resumed draft links its turns anew",
        "encode/encoder.py",
        "        linked = self._extras.link(turn, [match])\n",
        "        match = self._index.link(turn.prompt_ids)\n"
        "        linked = self._extras.link(turn, [match])\n",
        ("test_encoder",),
        package="generator",
    ),
)
