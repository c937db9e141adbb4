#!lua flags=allow-oom
-- Makes the caller the run's planner, or keeps it so, for a lease counted by the server's clock.
--
-- The epoch grows whenever the owner changes, so a planner that lost its lease is refused by every
-- later script, however late it wakes up.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash  read, to know that the run exists
--   KEYS[2] leader    hash  changed: epoch, owner, expires_ms, lease_ms; removed in a new epoch:
--                           planning_trouble, release_trouble, parked
-- Arguments: ARGV[1] owner    ARGV[2] lease in ms
--            ARGV[3] 1: do not lead a parked run, see park_leader.lua
-- Reply:     {1 if the caller leads, else 0; the leader's epoch; the leader; ms left of its lease;
--             where the run stays parked "<last event id> <last wake id>", else ""}
-- Errors:    NORUN  no such run

if redis.call('EXISTS', KEYS[1]) == 0 then
  return redis.error_reply('NORUN no such run')
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local epoch, owner, expires_ms, lease_ms, parked = unpack(
  redis.call('HMGET', KEYS[2], 'epoch', 'owner', 'expires_ms', 'lease_ms', 'parked'))
epoch = tonumber(epoch or 0)

if parked and ARGV[3] == '1' then
  return {0, epoch, owner, 0, parked}
end
if not parked and owner and owner ~= '' and owner ~= ARGV[1] and tonumber(expires_ms) > now_ms then
  local left_ms = expires_ms - now_ms
  if left_ms > tonumber(lease_ms) then
    -- The clock was set back. Without this, a dead leader would lead until it caught up.
    left_ms = tonumber(lease_ms)
    redis.call('HSET', KEYS[2], 'expires_ms', string.format('%.0f', now_ms + left_ms))
  end
  return {0, epoch, owner, left_ms, ''}
end
if parked or owner ~= ARGV[1] then
  epoch = epoch + 1
  redis.call('HDEL', KEYS[2], 'planning_trouble', 'release_trouble', 'parked')
end
redis.call('HSET', KEYS[2], 'epoch', epoch, 'owner', ARGV[1], 'lease_ms', ARGV[2],
  'expires_ms', string.format('%.0f', now_ms + ARGV[2]))
return {1, epoch, ARGV[1], tonumber(ARGV[2]), ''}
