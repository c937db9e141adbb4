#!lua
-- Declares an observer of a run, or lets one that is not forgotten come back where it was. One that
-- was forgotten begins anew, and is told from which step on it missed what came meanwhile, until it
-- has seen something.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier   hash    read: stepped, released
--   KEYS[2] observers  hash    name -> "<newest step seen>:<expires_ms>:<expiry in ms>", and then
--                              ":<first step missed>"; made here
--   KEYS[3] clock      hash    read: see run_clock.lua
--   KEYS[4] wake       stream  added, so that a planner leads, which counts the time of the expiry
-- Arguments:
--   ARGV[1] name    ARGV[2] first step of a new observer, 0 for the one after the last stepped
--   ARGV[3] expiry in ms
-- Reply:     {the next step that it has not seen; the first step that it missed, 0 for none}
-- Errors:
--   NORUN     no such run
--   RELEASED  the step that it would begin with is no longer retained

local CLOCK = KEYS[3]
-- include: turnstream.store.run/run_clock.lua

local stepped = redis.call('HGET', KEYS[1], 'stepped')
if not stepped then
  return redis.error_reply('NORUN no such run')
end
local seen, expires_ms, missed = string.match(
  redis.call('HGET', KEYS[2], ARGV[1]) or '', '^(%d+):(%d+):%d+:?(%d*)$')
if not seen or expires_ms == '0' then
  local before = seen
  seen = ARGV[2] == '0' and stepped or ARGV[2] - 1
  missed = before and tonumber(before) < tonumber(seen) and before + 1
end
local released = redis.call('HGET', KEYS[1], 'released') or 0
if tonumber(seen) < tonumber(released) then
  return redis.error_reply('RELEASED step ' .. seen + 1 .. ' is no longer retained: the oldest '
    .. 'batch kept is ' .. released + 1)
end
missed = tonumber(missed or 0) or 0
redis.call('HSET', KEYS[2], ARGV[1], string.format('%.0f:%.0f:%.0f', seen, run_ms() + ARGV[3],
  ARGV[3]) .. (missed > 0 and string.format(':%.0f', missed) or ''))
redis.call('XADD', KEYS[4], 'MAXLEN', 1, '*', 'w', '')
return {seen + 1, missed}
