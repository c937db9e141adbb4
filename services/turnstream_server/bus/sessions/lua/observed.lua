#!lua flags=allow-oom
-- Notes that an observer lives, and what it has seen. One whose expiry has passed lives on, until
-- forget_observers.lua has said otherwise. One that asks for more while it has a batch that it has
-- not seen may hang, and be asking ahead: that shows no life.
--
-- Keys, all in the run's slot:
--   KEYS[1] observers  hash  name -> "<newest step seen>:<expires_ms>:<expiry in ms>", and then
--                            ":<first step missed>"; changed
--   KEYS[2] clock      hash  read: see run_clock.lua
-- Arguments:
--   ARGV[1] name    ARGV[2] newest step seen; a lower one than before changes nothing
--   ARGV[3] the step that it asks for; 0 where it says what it has seen
-- Reply:     its expiry in ms
-- Errors:    EXPIRED  it was silent for longer than its expiry, or was never declared

local CLOCK = KEYS[2]
-- include: turnstream.store.run/run_clock.lua

local seen, expires_ms, expiry_ms, missed = string.match(
  redis.call('HGET', KEYS[1], ARGV[1]) or '', '^(%d+):(%d+):(%d+)(:?%d*)$')
if not seen or expires_ms == '0' then
  return redis.error_reply('EXPIRED observer ' .. ARGV[1] .. ' was '
    .. (seen and 'silent for more than ' .. expiry_ms / 1000 .. ' s' or 'never declared')
    .. '; nothing is kept for it')
end
if tonumber(ARGV[3]) > seen + 1 then
  return tonumber(expiry_ms)
end
local newest = math.max(tonumber(seen), tonumber(ARGV[2]))
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f:%.0f:%s', newest, run_ms() + expiry_ms,
  expiry_ms) .. (newest > tonumber(seen) and '' or missed))
return tonumber(expiry_ms)
