#!lua
-- Creates a run. The same config again changes nothing.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash  made here: stepped, committed, session_epoch, session, dp_world_size,
--                           lineage, live_groups, open_groups, opened_groups, closed,
--                           session_ms
--   KEYS[2] config    hash  made here: "1" -> the JSON, newest -> "1"
--   KEYS[3] counts    hash  made here: accepted and open, both 0
--   KEYS[4] clock     hash  made here: it stands still until a planner leads, see run_clock.py
--   KEYS[5] incarnation  string  read: number of the run that may be created; none: 1
-- Arguments: ARGV[1] config as JSON    ARGV[2] number of this run among those of its name
-- Reply:     the config revision, an integer; below 0, the number of the run that may be created in
--            place of this one, negated
-- Errors:    CONFLICT  the run exists with another config

local number = tonumber(redis.call('GET', KEYS[5]) or 1)
if number ~= tonumber(ARGV[2]) then
  return -number
end
local newest = redis.call('HGET', KEYS[2], 'newest')
if newest then
  if redis.call('HGET', KEYS[2], newest) == ARGV[1] then
    return tonumber(newest)
  end
  return redis.error_reply('CONFLICT the run exists with another config')
end
local time = redis.call('TIME')
local now_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', KEYS[1], 'stepped', 0, 'committed', 0, 'session_epoch', 0, 'session', '',
  'dp_world_size', 0, 'lineage', 'main', 'live_groups', 0, 'open_groups', 0,
  'opened_groups', 0, 'closed', 0, 'session_ms', now_ms)
redis.call('HSET', KEYS[2], '1', ARGV[1], 'newest', '1')
redis.call('HSET', KEYS[3], 'accepted', 0, 'open', 0)
redis.call('HSET', KEYS[4], 'ms', now_ms, 'at_ms', now_ms, 'most_ms', 0)
return 1
