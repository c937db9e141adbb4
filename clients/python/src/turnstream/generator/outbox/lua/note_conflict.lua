#!lua flags=allow-oom
-- Counts a write that was refused because its key has another content. The script that refuses it
-- may stand in the slot of a trajectory, and cannot count for the run.
--
-- Keys, in the run's slot:
--   KEYS[1] conflicts  hash  num, last ("<trajectory id>: <why>"), last_ms, token; changed
-- Arguments:
--   ARGV[1] trajectory id    ARGV[2] why it was refused
--   ARGV[3] token of the refusal: the same twice in a row is the same refusal
-- Reply:     1, or 0 where it was counted before

if redis.call('HGET', KEYS[1], 'token') == ARGV[3] then
  return 0
end
local time = redis.call('TIME')
redis.call('HINCRBY', KEYS[1], 'num', 1)
redis.call('HSET', KEYS[1], 'last', ARGV[1] .. ': ' .. ARGV[2], 'token', ARGV[3],
  'last_ms', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
return 1
