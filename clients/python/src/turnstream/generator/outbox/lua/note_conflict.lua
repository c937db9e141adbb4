#!lua flags=allow-oom
-- Counts a write that was refused because its key has another content. The script that refuses it
-- may stand in the slot of a trajectory, and cannot count for the run. A call that is repeated after
-- a lost answer counts again.
--
-- Keys, in the run's slot:
--   KEYS[1] conflicts  hash  num, last ("<trajectory id>: <why>"), last_ms; changed
-- Arguments: ARGV[1] trajectory id    ARGV[2] why it was refused
-- Reply:     1

local time = redis.call('TIME')
redis.call('HINCRBY', KEYS[1], 'num', 1)
redis.call('HSET', KEYS[1], 'last', ARGV[1] .. ': ' .. ARGV[2],
  'last_ms', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
return 1
