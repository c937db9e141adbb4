#!lua flags=allow-oom
-- Records that an observer is alive, and its newest seen step. A request for a further step,
-- without having seen the one before, does not count as alive: prefetch may run while the observer
-- hangs.
--
-- Arguments:
--   ARGV[1] name    ARGV[2] newest step seen; a lower one than before changes nothing
--   ARGV[3] the requested step; 0 for none
-- Reply:     its expiry in ms
-- Errors:    EXPIRED  it was silent for longer than its expiry, or was never declared

local OBSERVERS, CLOCK = unpack(KEYS)

-- include: turnstream.store.run/run_clock.lua

local seen, expires_ms, expiry_ms, missed = string.match(
  redis.call('HGET', OBSERVERS, ARGV[1]) or '', '^(%d+):(%d+):(%d+)(:?%d*)$')
if not seen or expires_ms == '0' then
  return redis.error_reply('EXPIRED observer ' .. ARGV[1] .. ' was '
    .. (seen and 'silent for more than ' .. expiry_ms / 1000 .. ' s' or 'never declared')
    .. '; nothing is kept for it')
end
if tonumber(ARGV[3]) > seen + 1 then
  return tonumber(expiry_ms)
end
local newest = math.max(tonumber(seen), tonumber(ARGV[2]))
redis.call('HSET', OBSERVERS, ARGV[1], string.format('%.0f:%.0f:%s', newest, run_ms() + expiry_ms,
  expiry_ms) .. (newest > tonumber(seen) and '' or missed))
return tonumber(expiry_ms)
