"""A script against the HTTP API, with the standard library alone: a run from its start to its end.

    turnstream up
    python examples/http_api.py [http://127.0.0.1:7601]

It creates a run, sends two turns of each trajectory one at a time, and prints ledger and reasons
for waiting.
"""

import json
import os
import sys
import urllib.error
import urllib.request

BASE = (sys.argv[1:] or ["http://127.0.0.1:7601"])[0] + "/v1/runs"


def call(method, path, body=None):
    """Return the answer of the API; the error of a problem document has its text."""
    headers = {
        "Content-Type": "application/json",
        "X-API-Key": os.environ.get("TURNSTREAM_API_KEY", ""),
    }
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(BASE + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request) as response:
            return json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{method} {path}: {error.code} {error.read().decode()}") from error


call("POST", "", {"name": "script", "settings": {"batch_groups": 1, "estimator": "grpo"}})
for sample in range(2):
    trajectory = {"group_id": "task-0", "sample": sample, "num_samples": 2}
    first = {"turn": 0, "prompt_ids": [1, 2], "response_ids": [3, 4], "policy_version": 0}
    second = {"turn": 1, "prompt_ids": [1, 2, 3, 4, 5], "response_ids": [6], "policy_version": 0}
    for turn in (first, second | {"seal": {"reward": float(sample)}}):
        (result,) = call("POST", "/script/turns", {"items": [trajectory | turn]})["results"]
        print(sample, turn["turn"], result["status"], result["state"])
call("POST", "/script/close", {"reason": "done"})
print(json.dumps(call("GET", "/script/ledger"), indent=2))
print(json.dumps(call("GET", "/script/waits"), indent=2))
