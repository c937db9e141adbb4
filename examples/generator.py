"""A generator in ten lines: samples of a policy without a model, over Redis or over HTTP.

turnstream up
python examples/generator.py                          # finds the store of `turnstream up`
python examples/generator.py http://127.0.0.1:7601    # over the gateway, with TURNSTREAM_API_KEY
"""

import random
import sys

import turnstream

run = turnstream.connect(*sys.argv[1:]).create_run("demo", batch_groups=2, estimator="grpo")
with run.publisher(writer="generator-0") as publisher:
    for task in range(20):
        with publisher.group(f"task-{task}", num_samples=4, exist_ok=True) as group:
            for trajectory in group:
                prompt_ids = [1, 2, 3]
                response_ids = random.choices(range(10), k=5)
                trajectory.append(prompt_ids, response_ids, policy_version=0)
                trajectory.seal(reward=response_ids.count(7))
run.close()
