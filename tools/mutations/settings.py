"""Guards of the settings of a run, each by itself."""

from __future__ import annotations

from mutations.mutation import Mutation

SETTINGS = (
    # ----------------------------------------------------------------------------------
    # single values
    Mutation(
        "True is a whole number",
        "config/values.py",
        "if not is_number or isinstance(value, bool) or",
        "if not is_number or",
        ("test_config",),
    ),
    Mutation(
        "a fraction is a whole number",
        "config/values.py",
        "int if kind is int else int | float",
        "int | float",
        ("test_config",),
    ),
    Mutation(
        "a number may be below its least",
        "config/values.py",
        "not least <= value <= most:",
        "not value <= most:",
        ("test_config",),
    ),
    Mutation(
        "seconds may be milliseconds",
        "config/values.py",
        "Annotated[float, Limits(0.3, _LONGEST_S)]",
        "Annotated[float, Limits(0.3)]",
        ("test_config",),
    ),
    Mutation(
        "whole seconds are stored as another config",
        "config/values.py",
        "    return kind(value)\n",
        "    return value\n",
        ("test_config",),
    ),
    Mutation(
        "a factor may be infinite",
        "config/values.py",
        "not least <= value <= most:",
        "not least <= value:",
        ("test_config",),
    ),
    Mutation(
        "a component has no name",
        "config/values.py",
        "not isinstance(name, str) or not name or not math",
        "not isinstance(name, str) or not math",
        ("test_config",),
    ),
    Mutation(
        "a component is named by a number",
        "config/values.py",
        "not isinstance(name, str) or not name or",
        "not name or",
        ("test_config",),
    ),
    Mutation(
        "a component weighs NaN",
        "config/values.py",
        " or not math.isfinite(weight):",
        ":",
        ("test_config",),
    ),
    Mutation(
        "a component is weighed twice",
        "config/values.py",
        "if len({name for name, _ in pairs}) < len(pairs):",
        "if False:",
        ("test_config",),
    ),
    Mutation(
        "components come in the order they were given",
        "config/values.py",
        "return tuple(sorted(pairs))",
        "return tuple(pairs)",
        ("test_config",),
    ),
    # ----------------------------------------------------------------------------------
    # fields
    Mutation(
        "an estimator that reads tokens is planned",
        "config/batching_config.py",
        "if reason := UNPLANNABLE_ESTIMATORS.get(str(self.estimator)):",
        "if False:",
        ("test_config",),
    ),
    Mutation(
        "a choice may be any word",
        "config/values.py",
        "if get_origin(hint) is Literal and value not in arguments:",
        "if False:",
        ("test_config",),
    ),
    Mutation(
        "extra columns are not checked",
        "config/batching_config.py",
        "checked_declarations(self.extra_columns, merge=self.merge)",
        "self.extra_columns",
        ("test_config",),
    ),
    Mutation(
        "a batch of the oldest weights is not chosen by an event",
        "config/batching_config.py",
        'return self.max_age_policy != "keep" or self.selection != "ready_first"',
        'return self.max_age_policy != "keep"',
        ("test_config",),
    ),
    Mutation(
        "groups that grow too old are not chosen by an event",
        "config/batching_config.py",
        'return self.max_age_policy != "keep" or self.selection != "ready_first"',
        'return self.selection != "ready_first"',
        ("test_config",),
    ),
    Mutation(
        "the budget of a pass forgets the alignment",
        "config/batching_config.py",
        "            alignment=self.alignment,\n",
        "",
        ("test_config",),
    ),
    Mutation(
        "the budget of a pass forgets the method of packing",
        "config/batching_config.py",
        "            packing=self.packing_method,\n",
        "",
        ("test_config",),
    ),
    Mutation(
        "the budget of a pass forgets the method of balance",
        "config/batching_config.py",
        "            balancing=self.balance_method,\n",
        "",
        ("test_config",),
    ),
    Mutation(
        "the budget of a pass forgets the order",
        "config/batching_config.py",
        "            order=self.pass_order,\n",
        "",
        ("test_config",),
    ),
    Mutation(
        "padded passes take a method of packing",
        "config/rules.py",
        'config.packing_method != "best_fit_decreasing" and config.micro_batch_cost == "padded"',
        "False",
        ("test_config",),
    ),
    Mutation(
        "a method packs passes without a limit",
        "config/rules.py",
        'config.packing_method != "best_fit_decreasing" and not limit',
        "False",
        ("test_config",),
    ),
    Mutation(
        "the budget of a pass forgets its model",
        "config/batching_config.py",
        "            model=self.micro_batch_cost,\n",
        "",
        ("test_config",),
    ),
)
