"""Guards of when a group is ready, and what becomes of those that are not."""

from __future__ import annotations

from mutations.mutation import Mutation

READINESS = (
    Mutation(
        "a group is ready one sample early",
        "members.py",
        "return len(self.members) >= self.opened.num_needed",
        "return len(self.members) >= self.opened.num_needed - 1",
        ("test_readiness",),
    ),
    Mutation(
        "a group that was decided opens again",
        "readiness.py",
        "event.group_id not in self._groups and event.group_id not in self._decided",
        "event.group_id not in self._groups",
        ("test_readiness",),
    ),
    Mutation(
        "another attempt replaces a sealed sample",
        "readiness.py",
        "if key.sample in group.members:\n            return f",
        "if False:\n            return f",
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
        "members.py",
        "return min(2, self.opened.num_needed)",
        "return 1",
        ("test_readiness",),
    ),
    Mutation(
        "members are in the order of their seals",
        "members.py",
        "in sorted(self.members.items())",
        "in self.members.items()",
        ("test_readiness",),
    ),
    Mutation(
        "groups without signal are dropped unasked",
        "open_groups.py",
        "if self._config.drop_zero_variance and teaches",
        "if teaches",
        ("test_readiness",),
    ),
    Mutation(
        "a deadline that a refill has moved fires all the same",
        "open_groups.py",
        "if not group.last_fired < event.num_refills == group.num_granted:",
        "if False:",
        ("test_readiness_deadlines", "test_readiness_machine"),
    ),
    Mutation(
        "a group asks for more refills than the run allows",
        "members.py",
        "if self.num_asked >= max_refills:",
        "if False:",
        ("test_readiness_deadlines", "test_readiness_machine"),
    ),
    Mutation(
        "a sample that can be spared is tried again",
        "members.py",
        "self._ask(lost[: max(0, num_missing)], max_refills)",
        "self._ask(lost, max_refills)",
        ("test_readiness_deadlines", "test_readiness_machine"),
    ),
    Mutation(
        "a deadline asks a second time for what is on its way",
        "members.py",
        "asked_for = {*self.members, *self.wanted.values()}",
        "asked_for = {*self.members}",
        ("test_readiness_deadlines", "test_readiness_machine"),
    ),
    Mutation(
        "a group does not wait for a granted refill",
        "members.py",
        "*(key.sample for key in (*self.awaiting, *self.granted))",
        "*(key.sample for key in self.awaiting)",
        ("test_readiness_deadlines", "test_readiness_machine"),
    ),
    Mutation(
        "a posted reward is not the one that is trained",
        "readiness.py",
        "reward=sealed.reward if event.reward is None else event.reward",
        "reward=sealed.reward",
        ("test_readiness_deadlines", "test_readiness_machine"),
    ),
    Mutation(
        "a reward that is missed is waited for",
        "readiness.py",
        "if group is None or group.awaiting.pop(key, None) is None:",
        "if group is None or key not in group.awaiting:",
        ("test_readiness_deadlines", "test_readiness_machine"),
    ),
    Mutation(
        "surplus joins a group that drops it",
        "readiness.py",
        'if key.group_id in self._ready and self._config.surplus == "drop":',
        "if False:",
        ("test_readiness_deadlines", "test_readiness_machine"),
    ),
    Mutation(
        "a group is cut and what awaits its reward is forgotten",
        "open_groups.py",
        "[surplus_member(key, reason) for key in group.awaiting]",
        "[]",
        ("test_readiness_deadlines", "test_readiness_machine"),
    ),
    Mutation(
        "a dropped group leaves behind what awaits its reward",
        "open_groups.py",
        "keys = (*(member.key for member in group.ordered), *group.awaiting)",
        "keys = tuple(member.key for member in group.ordered)",
        ("test_readiness_deadlines", "test_readiness_machine"),
    ),
    Mutation(
        "the dead member of a ready group is not tried again",
        "open_groups.py",
        "        if asked:\n            del self._ready[group_id]\n            return asked\n",
        "",
        ("test_readiness_deadlines", "test_readiness_machine"),
    ),
)
