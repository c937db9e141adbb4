"""Random damage to everything that is stored, to every gRPC request, to HTTP bodies and to keys.

python -m fuzz --cases 2000 --seed 7      all kinds of damage, in turn; a summary at the end

Each case depends only on the seed and its number.

- `damage` changes bytes, and one place of a stored run.
- `runs` makes and trains small runs whose rows are known.
- `calls` sends damaged requests.
- `campaign` combines these and judges the result.
- `bodies` damages HTTP bodies, plain and compressed.
- `services` sends them, and calls with damaged keys, to services that require keys.
"""
