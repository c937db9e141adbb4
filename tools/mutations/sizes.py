"""Guards of numbers of rows: bins, parts, passes and mini-batches."""

from __future__ import annotations

from mutations.mutation import Mutation

SIZES = (
    # ----------------------------------------------------------------------------------
    # bins
    Mutation(
        "an empty row is packed",
        "packing/bins.py",
        "        if size < 1:\n",
        "        if size < 0:\n",
        ("test_packing",),
    ),
    Mutation(
        "a capacity or an alignment of 0 is taken",
        "packing/bins.py",
        "    if capacity < 1 or alignment < 1:\n",
        "    if False:\n",
        ("test_packing",),
    ),
    Mutation(
        "bins grow by empty ones where rows are missing",
        "packing/bins.py",
        "    if num_rows < target:\n",
        "    if False:\n",
        ("test_packing",),
    ),
    Mutation(
        "bins grow to a multiple of nothing",
        "packing/bins.py",
        "    if multiple_of < 1:\n",
        "    if False:\n",
        ("test_packing",),
    ),
    Mutation(
        "the lightest bin is split",
        "packing/bins.py",
        "heaviest = max(splittable",
        "heaviest = min(splittable",
        ("test_packing",),
    ),
    Mutation(
        "of bins alike the last is split",
        "packing/bins.py",
        "(loads[index], -index)",
        "(loads[index], index)",
        ("test_packing",),
    ),
    Mutation(
        "a bin is split into a heavy and a light half",
        "packing/bins.py",
        "lighter = int(totals[1] < totals[0])",
        "lighter = int(totals[1] > totals[0])",
        ("test_packing",),
    ),
    Mutation(
        "bins do not grow to the least number",
        "packing/bins.py",
        "target = max(len(bins), at_least, 1)",
        "target = max(len(bins), 1)",
        ("test_packing",),
    ),
    Mutation(
        "worst fit takes a bin with too little room",
        "packing/bins.py",
        "-emptiest[0][0] >= size",
        "-emptiest[0][0] >= size - 1",
        ("test_packing",),
    ),
    Mutation(
        "worst fit takes any bin with room",
        "packing/bins.py",
        "heapq.heapreplace(emptiest, (space + size, index))",
        "heapq.heapreplace(emptiest, (space, index))",
        ("test_packing",),
    ),
    Mutation(
        "next fit goes back to earlier bins",
        "packing/bins.py",
        "            space = capacity\n        bins[-1]",
        "            space += capacity\n        bins[-1]",
        ("test_packing",),
    ),
    Mutation(
        "a medium row goes where none fits",
        "packing/bins.py",
        "    medium, small = capacity // 3, capacity // 6\n",
        "    medium, small = capacity // 4, capacity // 6\n",
        ("test_packing",),
    ),
    Mutation(
        "two small rows that do not fit go beside a large one",
        "packing/bins.py",
        "if pair and sum(sizes[row] for row in pair) <= spaces[index]:",
        "if pair:",
        ("test_packing",),
    ),
    # ----------------------------------------------------------------------------------
    # parts and passes
    Mutation(
        "no part is a number of parts",
        "packing/balance.py",
        "    if num_parts < 1:\n",
        "    if False:\n",
        ("test_balance",),
    ),
    Mutation(
        "parts of equal count take one item more",
        "packing/balance.py",
        "if len(parts[part]) < max_items:",
        "if len(parts[part]) <= max_items:",
        ("test_balance",),
    ),
    Mutation(
        "ranks have different numbers of passes",
        "packing/microbatch.py",
        "        if len(share) < num_passes:\n",
        "        if False:\n",
        ("test_microbatch",),
    ),
    Mutation(
        "the number of passes is no multiple of the stages",
        "packing/microbatch.py",
        "num_passes = -(-num_passes // multiple_of) * multiple_of",
        "num_passes = num_passes",
        ("test_microbatch",),
    ),
    Mutation(
        "the budget forgets the alignment",
        "packing/microbatch.py",
        "-(-int(length) // budget.alignment) * budget.alignment",
        "int(length)",
        ("test_microbatch",),
    ),
    Mutation(
        "parts are balanced beyond the budget",
        "packing/microbatch.py",
        "is_better = all(parts) and largest_part(parts, costs) < largest_part(grown, costs)",
        "is_better = True",
        ("test_microbatch",),
    ),
    Mutation(
        "the cheapest pass comes first",
        "packing/microbatch.py",
        "(-weigh([lengths[row] for row in rows]), rows[0])",
        "(weigh([lengths[row] for row in rows]), rows[0])",
        ("test_microbatch", "test_minibatch"),
    ),
    # ----------------------------------------------------------------------------------
    # mini-batches
    Mutation(
        "a size of 0 has to divide",
        "rows/minibatch.py",
        "    if min(sizes) < 1:\n",
        "    if False:\n",
        ("test_minibatch",),
    ),
    Mutation(
        "a multiple of 0 has to divide",
        "packing/bins.py",
        "        if size < 1:\n",
        "        if False:\n",
        ("test_packing",),
    ),
    Mutation(
        "a mini-batch without rows gives ranks nothing",
        "rows/minibatch.py",
        "max(-(-num_rows // multiple), 1) * multiple",
        "-(-num_rows // multiple) * multiple",
        ("test_minibatch",),
    ),
    Mutation(
        "the smallest multiple is one of the ranks alone",
        "rows/minibatch.py",
        "multiple = math.lcm(dp_world_size, multiple_of)",
        "multiple = dp_world_size",
        ("test_minibatch",),
    ),
    Mutation(
        "an id of another inert row is given",
        "rows/plain_rows.py",
        "    if not fits or not 0 <= step < 1 << 31:\n",
        "    if False:\n",
        ("test_minibatch",),
    ),
    Mutation(
        "inert rows end a trajectory",
        "rows/plain_rows.py",
        "is_last=np.zeros(num_rows, np.bool_)",
        "is_last=np.ones(num_rows, np.bool_)",
        ("test_minibatch",),
    ),
    Mutation(
        "all inert rows are one group",
        "rows/plain_rows.py",
        'names = [f"inert{row_id}" for row_id in row_ids]',
        'names = ["inert"] * num_rows',
        ("test_minibatch",),
    ),
)
