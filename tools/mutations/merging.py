"""Guards of how turns become rows: which goes on in whose row, and what is copied together."""

from __future__ import annotations

from mutations.mutation import Mutation

MERGING = (
    # ----------------------------------------------------------------------------------
    # merging
    Mutation(
        "a plan merges turns whose context was edited",
        "merge.py",
        "row is not None and shape.shared_tokens == num_tokens[parent]",
        "row is not None",
        ("test_merge_laws",),
    ),
    Mutation(
        "merging joins turns whose response was edited",
        "continuing.py",
        "if row.startswith(prompt.data) and row.startswith(\n"
        "            turns.responses[before].data, prompt.nbytes\n"
        "        ):",
        "if row.startswith(prompt.data):",
        ("test_continuing",),
    ),
    Mutation(
        "merging goes on behind the turn before where another holds more of the prompt",
        "continuing.py",
        "        _is_longest(turns)[before]\n",
        "        (turns.num_tokens_N[before] > 0)\n",
        ("test_continuing",),
    ),
    Mutation(
        "merging goes on behind the second of two equal turns",
        "continuing.py",
        "lifted_N[1:] > np.maximum",
        "lifted_N[1:] >= np.maximum",
        ("test_continuing",),
    ),
    Mutation(
        "merging goes on behind a turn without tokens",
        "continuing.py",
        "is_longest_N = turns.num_tokens_N > 0",
        "is_longest_N = turns.num_tokens_N >= 0",
        ("test_continuing",),
    ),
    Mutation(
        "a prompt that ends inside the turn before goes on behind it",
        "continuing.py",
        "(turns.num_tokens_N[before] <= turns.num_prompt_N[after])",
        "(turns.num_prompt_N[after] > 0)",
        ("test_continuing",),
    ),
    Mutation(
        "a prompt must hold every end of a row to go on behind one",
        "continuing.py",
        "    return any(\n        prompt.startswith(turns.prompts[other].data)",
        "    return all(\n        prompt.startswith(turns.prompts[other].data)",
        ("test_continuing",),
    ),
    Mutation(
        "ends of rows before an earlier question are forgotten",
        "continuing.py",
        "            ends += [before",
        "            ends = [before",
        ("test_continuing",),
    ),
    Mutation(
        "a turn goes on behind one of another trajectory",
        "continuing.py",
        "        & (turns.trajectory_N[before] == turns.trajectory_N[after])\n",
        "",
        ("test_continuing",),
    ),
    Mutation(
        "a prompt is taken for the one behind it",
        "continuing.py",
        "if held != place:",
        "if not row:",
        ("test_continuing",),
    ),
    Mutation(
        "a prompt that leaves its parent inside goes on in its row",
        "continuing.py",
        "if parent != NO_PARENT and shared == turns.num_tokens_N[first + parent]:",
        "if parent != NO_PARENT:",
        ("test_continuing",),
    ),
    Mutation(
        "two turns go on in the row of one",
        "continuing.py",
        "if parent not in taken:",
        "if True:",
        ("test_continuing",),
    ),
    Mutation(
        "merging forgets a turn that it needed no index for",
        "continuing.py",
        "for before in range(known, place):",
        "for before in range(place - 1, place):",
        ("test_continuing",),
    ),
    Mutation(
        "a turn that begins as an earlier one does is never looked up",
        "continuing.py",
        "if num_prompt[place] and beginning in seen:",
        "if False:",
        ("test_continuing",),
    ),
    Mutation(
        "ids of another type are compared",
        "continuing.py",
        "if {array.dtype for array in arrays} - {_INT32}:",
        "if False:",
        ("test_continuing",),
    ),
    Mutation(
        "a turn goes on in the row before that of its parent",
        "merge.py",
        "numbers.append(numbers[parent])",
        "numbers.append(num_rows - 1)",
        ("test_merge",),
    ),
    Mutation(
        "a second branch goes on in the row of the first",
        "merge.py",
        "            del row_ending_in[parent]\n        else:\n            row = ",
        "            pass\n        else:\n            row = ",
        ("test_merge_laws",),
    ),
    Mutation(
        "splitting gives a turn log-probabilities that it never had",
        "merge.py",
        "return None if np.isnan(logprobs).any() else logprobs",
        "return logprobs",
        ("test_merge_laws",),
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
        "if found != counts:",
        "if sum(found) > sum(counts):",
        ("test_merge",),
    ),
    Mutation(
        "a version run goes on in the next row",
        "columns.py",
        "(version_N[1:] != version_N[:-1]) | (row_N[1:] != row_N[:-1])",
        "version_N[1:] != version_N[:-1]",
        ("test_columns",),
    ),
    Mutation(
        "tokens are observed before the first response of the next row",
        "columns.py",
        "gap_N[self.offsets[:-1]] = 0",
        "pass",
        ("test_merge",),
    ),
    Mutation(
        "a turn takes more tokens than its parent has",
        "columns.py",
        "if own > len(turn.token_ids):",
        "if False:",
        ("test_columns",),
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
        "a prompt that ends before what is known counts as going on",
        "prefix.py",
        "return length <= len(prompt) and self.tokens.startswith(prompt[:length])",
        "return self.tokens.startswith(prompt[:length])",
        ("test_prefix",),
    ),
    Mutation(
        "a prompt that leaves the last turn inside goes on behind it",
        "prefix.py",
        "if 0 < end == line.length and line.depth == 0 and line.begins(prompt):",
        "if end and line.depth == 0 and line.begins(prompt):",
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
        "line, offset, known = self._walk(line, offset, response)",
        "known = 0",
        ("test_prefix",),
    ),
)
