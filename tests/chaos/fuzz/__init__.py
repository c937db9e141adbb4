"""Random damage to gRPC requests, HTTP bodies and keys.

python -m fuzz --cases 2000 --seed 7      all kinds of damage, in turn; a summary at the end

Each case depends only on the seed and its number. Damage to what is stored has tests of its own:
turns and seals in `test_poison`, events in `test_rejections_are_final`, and counters in the
simulation.

- `damage` changes bytes and messages.
- `calls` sends damaged gRPC requests.
- `bodies` damages HTTP bodies, plain and compressed.
- `services` sends all of it to services that require keys, and judges the answers.
"""
