#!lua
-- Declares an observer of a run, or resumes one. An expired one restarts, and receives the first
-- step that it missed, until it has seen another one.
--
-- Arguments:
--   ARGV[1] name    ARGV[2] first step of a new observer, 0 for the one after the last stepped
--   ARGV[3] expiry in ms
-- Reply:     {the next step that it has not seen; the first step that it missed, 0 for none}
-- Errors:
--   NORUN     no such run
--   RELEASED  its first step is no longer retained

local FRONTIER, OBSERVERS, CLOCK, WAKE = unpack(KEYS)

-- include: turnstream.store.run/run_clock.lua

local stepped = redis.call('HGET', FRONTIER, 'stepped')
if not stepped then
  return redis.error_reply('NORUN no such run')
end
local seen, expires_ms, missed = string.match(
  redis.call('HGET', OBSERVERS, ARGV[1]) or '', '^(%d+):(%d+):%d+:?(%d*)$')
if not seen or expires_ms == '0' then
  local before = seen
  seen = ARGV[2] == '0' and stepped or ARGV[2] - 1
  missed = before and tonumber(before) < tonumber(seen) and before + 1
end
local released = redis.call('HGET', FRONTIER, 'released') or 0
if tonumber(seen) < tonumber(released) then
  return redis.error_reply('RELEASED step ' .. seen + 1 .. ' is no longer retained: the oldest '
    .. 'batch kept is ' .. released + 1)
end
missed = tonumber(missed or 0) or 0
redis.call('HSET', OBSERVERS, ARGV[1], string.format('%.0f:%.0f:%.0f', seen, run_ms() + ARGV[3],
  ARGV[3]) .. (missed > 0 and string.format(':%.0f', missed) or ''))
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return {seen + 1, missed}
