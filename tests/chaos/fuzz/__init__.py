"""Random damage to everything that is stored and to every gRPC request.

python -m fuzz --cases 2000 --seed 7      all kinds of damage, in turn; a summary at the end

Each case depends only on the seed and its number.

- `damage` changes bytes, and one place of a stored run.
- `runs` makes and trains small runs whose rows are known.
- `calls` sends damaged requests.
- `campaign` combines these and judges the result.
"""
