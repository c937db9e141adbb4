#!/bin/sh
# A generator in shell: whole trajectories over HTTP, four samples of each of ten tasks.
#
#   turnstream up
#   sh examples/generator.sh                 # TURNSTREAM_HTTP_URL and TURNSTREAM_API_KEY for another gateway
set -eu
url=${TURNSTREAM_HTTP_URL:-http://127.0.0.1:7601}/v1/runs

post() { # path, body
  curl --silent --show-error --fail-with-body --retry 8 --retry-all-errors \
    -H "X-API-Key: ${TURNSTREAM_API_KEY:-}" -H 'Content-Type: application/json' -d "$2" "$url$1"
  echo
}

post "" '{"name": "shell", "settings": {"batch_groups": 2, "max_staleness": 8, "estimator": "grpo"}}'
for task in 0 1 2 3 4 5 6 7 8 9; do
  items=
  for sample in 0 1 2 3; do
    token=$(((task + sample) % 10))
    reward=$((token % 2))
    items="$items${items:+,}{\"group_id\": \"task-$task\", \"sample\": $sample, \"num_samples\": 4,
      \"turns\": [{\"prompt_ids\": [1, 2, 3], \"response_ids\": [$token, 5], \"policy_version\": 0}], \"reward\": $reward}"
  done
  post /shell/trajectories "{\"items\": [$items]}"
done
post /shell/close '{"reason": "all tasks are done"}'
