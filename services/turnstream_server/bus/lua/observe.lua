#!lua
-- Declares an observer of a run, or lets one that has not expired come back where it was.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier   hash  read: stepped, released
--   KEYS[2] observers  hash  name -> "<newest step seen>:<expires_ms>:<expiry in ms>", made here
-- Arguments:
--   ARGV[1] name    ARGV[2] first step of a new observer, 0 for the one after the last stepped
--   ARGV[3] expiry in ms
-- Reply:     the next step that it has not seen, an integer
-- Errors:
--   NORUN     no such run
--   RELEASED  the step that it would begin with is no longer retained

local stepped = redis.call('HGET', KEYS[1], 'stepped')
if not stepped then
  return redis.error_reply('NORUN no such run')
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local seen, expires_ms = string.match(redis.call('HGET', KEYS[2], ARGV[1]) or '', '^(%d+):(%d+):')
if not seen or tonumber(expires_ms) <= now_ms then
  seen = ARGV[2] == '0' and stepped or ARGV[2] - 1
end
local released = redis.call('HGET', KEYS[1], 'released') or 0
if tonumber(seen) < tonumber(released) then
  return redis.error_reply('RELEASED step ' .. seen + 1 .. ' is no longer retained: the oldest '
    .. 'batch kept is ' .. released + 1)
end
redis.call('HSET', KEYS[2], ARGV[1],
  string.format('%.0f:%.0f:%.0f', seen, now_ms + ARGV[3], ARGV[3]))
return seen + 1
