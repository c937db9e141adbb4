#!lua flags=allow-oom
-- Lets the clock of a run go on, by which its deadlines and the expiry of its observers are.
--
-- The store's clock may be set. So the planner that leads counts with its own, which cannot, and
-- says here which time of the run it was at which time of the store; between two such words
-- run_clock.lua goes by the store. While nobody leads, the run's time stands still.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader  hash  read: epoch, parked: the time of a parked run stands still
--   KEYS[2] clock   hash  ms, at_ms, most_ms: changed; made here for a run of a release before, with
--                         the time of the store
-- Arguments:
--   ARGV[1] leader epoch
--   ARGV[2] the run's time, ms; "" at the beginning of a term
--   ARGV[3] the store's time then, ms
--   ARGV[4] by how much the run's time may go on, in ms, until the next word
-- Reply:     the run's time now, ms; it never goes back
-- Errors:    FENCED  another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local known, at_ms, most_ms = unpack(redis.call('HMGET', KEYS[2], 'ms', 'at_ms', 'most_ms'))
if known and redis.call('HEXISTS', KEYS[1], 'parked') == 1 then
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
redis.call('HSET', KEYS[2], 'ms', string.format('%.0f', ms), 'at_ms', ARGV[3], 'most_ms', ARGV[4])
return ms
