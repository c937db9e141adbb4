#!lua
-- Stores another config of a run, which takes effect when the step before its first is planned.
--
-- Arguments: ARGV[1] config as JSON    ARGV[2] its first step
--            ARGV[3] the revision that it changes, the last that the caller knows
-- Reply:     the revision; the same where the last one is this very config from this step

local FRONTIER, CONFIG, WAKE = unpack(KEYS)
local newest, last = unpack(redis.call('HMGET', CONFIG, 'newest', 'last'))
if not newest then
  return redis.error_reply('NORUN no such run')
end
last = tonumber(last or newest)
local step = tonumber(ARGV[2])
local first = tonumber(redis.call('HGET', CONFIG, 'from:' .. last) or 1)
if redis.call('HGET', CONFIG, last) == ARGV[1] then
  if first == step or last == 1 then
    return last
  end
  return redis.error_reply('CONFLICT revision ' .. last .. ' is this config, from step ' .. first
    .. ' on')
end
if last ~= tonumber(ARGV[3]) then
  return redis.error_reply('CONFLICT revision ' .. last .. ' was stored since, from step '
    .. first .. ' on: look at it, and revise again')
end
local planned, next_revision = unpack(redis.call('HMGET', FRONTIER, 'planned', 'next_revision'))
planned = tonumber(planned or 0)
if step <= planned then
  return redis.error_reply('CONFLICT step ' .. step .. ' is planned; the first that is not is step '
    .. planned + 1)
end
if step < first then
  return redis.error_reply('CONFLICT revision ' .. last .. ' takes effect at step ' .. first
    .. '; name that step, or a later one, and not step ' .. step)
end
last = last + 1
redis.call('HSET', CONFIG, last, ARGV[1], 'from:' .. last, ARGV[2], 'last', last)
if tonumber(next_revision or 0) == 0 then
  redis.call('HSET', FRONTIER, 'next_revision', ARGV[2])
end
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return last
