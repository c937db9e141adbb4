"""Guards of the settings of a run, each by itself."""

from __future__ import annotations

from mutations.mutation import Mutation

SETTINGS = (
    # ----------------------------------------------------------------------------------
    # single values
    Mutation(
        "True is a whole number",
        "config/values.py",
        "if isinstance(value, bool) or not isinstance(value, int) or value < least:",
        "if not isinstance(value, int) or value < least:",
        ("test_config",),
    ),
    Mutation(
        "a fraction is a whole number",
        "config/values.py",
        "not isinstance(value, int) or value < least:",
        "value < least:",
        ("test_config",),
    ),
    Mutation(
        "a number may be below its least",
        "config/values.py",
        "not isinstance(value, int) or value < least:",
        "not isinstance(value, int):",
        ("test_config",),
    ),
    Mutation(
        "True is a number of seconds",
        "config/values.py",
        "if not _is_number(value) or not least_s <=",
        "if not isinstance(value, int | float) or not least_s <=",
        ("test_config",),
    ),
    Mutation(
        "seconds may be too few",
        "config/values.py",
        "not least_s <= value <= _LONGEST_S",
        "not value <= _LONGEST_S",
        ("test_config",),
    ),
    Mutation(
        "seconds may be milliseconds",
        "config/values.py",
        "not least_s <= value <= _LONGEST_S",
        'not least_s <= value < float("inf")',
        ("test_config",),
    ),
    Mutation(
        "whole seconds are stored as another config",
        "config/values.py",
        "        )\n    return float(value)\n\n\ndef checked_f",
        "        )\n    return value\n\n\ndef checked_f",
        ("test_config",),
    ),
    Mutation(
        "True is a cost",
        "config/values.py",
        "if not _is_number(value) or not 0 <=",
        "if not isinstance(value, int | float) or not 0 <=",
        ("test_config",),
    ),
    Mutation(
        "a factor may be negative",
        "config/values.py",
        "not 0 <= value <= most",
        "not value <= most",
        ("test_config",),
    ),
    Mutation(
        "a factor may be infinite",
        "config/values.py",
        "not 0 <= value <= most",
        "not 0 <= value",
        ("test_config",),
    ),
    Mutation(
        "a whole factor is stored as another config",
        "config/values.py",
        "    return float(value)\n\n\ndef _is",
        "    return value\n\n\ndef _is",
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
        "a limit may be negative",
        "config/batching_config.py",
        "            require_at_least(getattr(self, name), least, field=name)\n",
        "            pass\n",
        ("test_config",),
    ),
    Mutation(
        "an estimator that reads tokens is planned",
        "config/batching_config.py",
        "if self.estimator in UNPLANNABLE_ESTIMATORS:",
        "if False:",
        ("test_config",),
    ),
    Mutation(
        "a choice may be any word",
        "config/batching_config.py",
        "if getattr(self, name) not in choices:",
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
        "the budget of a pass forgets its model",
        "config/batching_config.py",
        "            model=self.micro_batch_cost,\n",
        "",
        ("test_config",),
    ),
)
