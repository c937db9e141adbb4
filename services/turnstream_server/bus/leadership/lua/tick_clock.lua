#!lua flags=allow-oom
-- Advances the clock of a run, which measures its deadlines and the expiry of its observers.
--
-- An operator may set the store's clock. So the leader counts with its monotonic clock, and writes
-- here which time of the run was which time of the store. Between two writes run_clock.lua uses the
-- store's clock. The clock stops while the run has no leader.
--
-- Arguments:
--   ARGV[1] leader epoch
--   ARGV[2] the run's time, ms; "" at the beginning of a term
--   ARGV[3] the store's time then, ms
--   ARGV[4] longest advance until the next call, in ms
-- Reply:     the run's time now, ms; it never decreases

local LEADER, CLOCK = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local known, at_ms, most_ms = unpack(redis.call('HMGET', CLOCK, 'ms', 'at_ms', 'most_ms'))
if known and redis.call('HEXISTS', LEADER, 'parked') == 1 then
  return tonumber(known)
end
local ms = tonumber(ARGV[2] ~= '' and ARGV[2] or known or ARGV[3])
if known and ARGV[2] == '' then
  -- A short gap between two terms counts. A long one may be a clock that was set.
  local gap_ms = ARGV[3] - at_ms
  ms = ms + (gap_ms >= 0 and gap_ms <= tonumber(most_ms) and gap_ms or 0)
elseif known and ms < tonumber(known) then
  return tonumber(known)
end
redis.call('HSET', CLOCK, 'ms', string.format('%.0f', ms), 'at_ms', ARGV[3], 'most_ms', ARGV[4])
return ms
