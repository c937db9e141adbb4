#!lua
-- Creates a run. The same config again changes nothing.
-- Arguments: ARGV[1] config as JSON    ARGV[2] number of this run among those of its name
-- Reply:     the config revision; below 0, the number of the run that may be created in place of this
--            one, negated

local FRONTIER, CONFIG, COUNTS, CLOCK, INCARNATION = unpack(KEYS)
local number = tonumber(redis.call('GET', INCARNATION) or 1)
if number ~= tonumber(ARGV[2]) then
  return -number
end
local newest = redis.call('HGET', CONFIG, 'newest')
if newest then
  if redis.call('HGET', CONFIG, newest) == ARGV[1] then
    return tonumber(newest)
  end
  return redis.error_reply('CONFLICT the run exists with another config')
end

-- include: server_time.lua

local now_ms = now_text()
redis.call('HSET', FRONTIER, 'stepped', 0, 'committed', 0, 'session_epoch', 0, 'session', '',
  'dp_world_size', 0, 'lineage', 'main', 'live_groups', 0, 'open_groups', 0,
  'opened_groups', 0, 'closed', 0, 'session_ms', now_ms)
redis.call('HSET', CONFIG, '1', ARGV[1], 'newest', '1')
redis.call('HSET', COUNTS, 'accepted', 0, 'open', 0)
redis.call('HSET', CLOCK, 'ms', now_ms, 'at_ms', now_ms, 'most_ms', 0)
return 1
