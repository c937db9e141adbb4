"""Examples of bodies and results, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Final

GROUPS: Final[dict[str, Any]] = {
    "items": [{"group_id": "task-7", "num_samples": 2, "prompt_uid": "gsm8k-7"}]
}
GROUP_RESULTS: Final[dict[str, Any]] = {
    "results": [{"index": 0, "status": 201, "group_id": "task-7", "open_samples": [0, 1]}]
}
TURNS: Final[dict[str, Any]] = {
    "items": [
        {
            "group_id": "task-7",
            "sample": 0,
            "num_samples": 2,
            "turn": 0,
            "prompt_ids": [11, 12, 13],
            "response_ids": [21, 22],
            "logprobs": [-0.5, -1.25],
            "policy_version": 3,
        },
        {
            "group_id": "task-7",
            "sample": 0,
            "turn": 1,
            "prompt_ids": [11, 12, 13, 21, 22, 31],
            "response_ids": [41],
            "logprobs": [-0.75],
            "policy_version": 3,
            "seal": {"reward": 1.0, "tags": {"task": "gsm8k"}},
        },
    ]
}
TRAJECTORIES: Final[dict[str, Any]] = {
    "items": [
        {
            "group_id": "task-8",
            "sample": 0,
            "num_samples": 1,
            "turns": [{"prompt_ids": [11, 12], "response_ids": [21], "logprobs": [-0.5]}],
            "reward": 1.0,
        }
    ]
}
WRITE_RESULTS: Final[dict[str, Any]] = {
    "results": [
        {
            "index": 0,
            "status": 201,
            "group_id": "task-7",
            "sample": 0,
            "attempt": 0,
            "state": "open",
            "next_turn": 1,
        },
        {
            "index": 1,
            "status": 409,
            "group_id": "task-7",
            "sample": 1,
            "attempt": 0,
            "next_turn": 0,
            "problem": {
                "type": "https://turnstream.dev/problems/turn-gap",
                "title": "An earlier turn is missing",
                "status": 409,
                "detail": "turn 1 of task-7/1/0 does not follow: the next turn is turn 0",
            },
        },
    ]
}
