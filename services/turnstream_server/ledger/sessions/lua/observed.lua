#!lua flags=allow-oom
-- Records that an observer is alive, and its newest seen step: see note_observed in observers.py. A
-- request for a further step, without having seen the one before, does not count as alive: prefetch
-- may run while the observer hangs.
--
-- Arguments: ARGV[1] name    ARGV[2] newest step seen; a lower one than before changes nothing
--            ARGV[3] the requested step; 0 for none
--            ARGV[4] owner of the caller's key    ARGV[5] 1 if it may use any observer
-- Reply:     its expiry in ms

local FRONTIER, OBSERVERS, CLOCK = unpack(KEYS)

-- include: turnstream.store.run/run_clock.lua
-- include: observer_of.lua

local seen, expires_ms, expiry_ms, missed, owner = fields_of(
  redis.call('HGET', OBSERVERS, ARGV[1]))
local refusal = refused_to(ARGV[4], ARGV[5], owner)
if refusal then
  return refusal
end
if not seen or expires_ms == '0' then
  return redis.error_reply('EXPIRED observer ' .. ARGV[1] .. ' was '
    .. (seen and 'silent for more than ' .. expiry_ms / 1000 .. ' s' or 'never declared, or was removed')
    .. '; nothing is kept for it')
end
local planned = redis.call('HGET', FRONTIER, 'planned') or 0
if tonumber(ARGV[2]) > tonumber(planned) then
  return redis.error_reply('BEHIND observer ' .. ARGV[1] .. ' has seen step ' .. ARGV[2]
    .. ', but the newest batch of this store is ' .. planned)
end
if tonumber(ARGV[3]) > seen + 1 then
  return tonumber(expiry_ms)
end
local newest = math.max(tonumber(seen), tonumber(ARGV[2]))
redis.call('HSET', OBSERVERS, ARGV[1], string.format('%.0f:%.0f:%s', newest, run_ms() + expiry_ms,
  expiry_ms) .. (newest > tonumber(seen) and '' or missed) .. owner)
return tonumber(expiry_ms)
