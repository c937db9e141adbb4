"""Random damage to everything that is stored and to every gRPC request.

python -m fuzz --cases 2000 --seed 7      all kinds of damage, in turn; a summary at the end

Each case depends only on the seed and its number.

- `damage` changes bytes.
- `runs` makes small runs whose rows are known.
- `stored` damages one place of a stored run.
- `calls` sends damaged requests.
- `pace` trains an undamaged run in the same store all the time.
- `campaign` combines these and judges the result.
"""
