#!lua flags=allow-oom
-- Makes the caller the leader of the run for a lease, by the server's clock: see acquire_leadership.
-- The epoch grows when the owner changes, so every script refuses a leader that lost its lease.
--
-- Arguments: ARGV[1] owner    ARGV[2] lease in ms
--            ARGV[3] 1: do not lead a parked run, see leader_fields.py
--            ARGV[4] its epoch to renew the lease, also an expired one, if no other planner has led
--                    since: a late call begins no term, and a parked run stays as it is. Else ""
-- Reply:     {1 if the caller leads, else 0; the leader's epoch; the leader; ms left of its lease;
--             where the run stays parked "<last event id> <last wake id>", else ""}

local FRONTIER, LEADER = unpack(KEYS)

-- include: turnstream.store.run/server_time.lua

local now_ms = server_ms()
local epoch, owner, expires_ms, lease_ms, parked = unpack(
  redis.call('HMGET', LEADER, 'epoch', 'owner', 'expires_ms', 'lease_ms', 'parked'))
epoch = tonumber(epoch or 0)

if ARGV[4] ~= '' and (owner ~= ARGV[1] or epoch ~= tonumber(ARGV[4])) then
  return {0, epoch, owner or '', 0, ''}
elseif ARGV[4] ~= '' and parked then
  return {1, epoch, owner, 0, ''}
elseif redis.call('EXISTS', FRONTIER) == 0 then
  return redis.error_reply('NORUN no such run')
end

if parked and ARGV[3] == '1' then
  return {0, epoch, owner, 0, parked}
end
if not parked and owner and owner ~= '' and owner ~= ARGV[1] and tonumber(expires_ms) > now_ms then
  local left_ms = expires_ms - now_ms
  if left_ms > tonumber(lease_ms) then
    -- The clock was set back. Without this, a dead leader would lead until it caught up.
    left_ms = tonumber(lease_ms)
    redis.call('HSET', LEADER, 'expires_ms', string.format('%.0f', now_ms + left_ms))
  end
  return {0, epoch, owner, left_ms, ''}
end
if parked or owner ~= ARGV[1] then
  epoch = epoch + 1
  redis.call('HDEL', LEADER, 'planning_trouble', 'release_trouble', 'parked')
end
redis.call('HSET', LEADER, 'epoch', epoch, 'owner', ARGV[1], 'lease_ms', ARGV[2],
  'expires_ms', string.format('%.0f', now_ms + ARGV[2]))
return {1, epoch, ARGV[1], tonumber(ARGV[2]), ''}
