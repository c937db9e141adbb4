#!lua flags=allow-oom
-- Renews the lease of a run's planner, also an expired one, if no other planner has led since. A
-- late call begins no term. The lease of a planner that has parked its run stays as it is.
--
-- Arguments: ARGV[1] owner    ARGV[2] its epoch    ARGV[3] lease in ms
-- Reply:     {1, or 0 after the end of the term; the leader's epoch; the leader}

local LEADER = KEYS[1]

-- include: turnstream.store.run/server_time.lua

local epoch, owner, parked = unpack(redis.call('HMGET', LEADER, 'epoch', 'owner', 'parked'))
if owner ~= ARGV[1] or epoch ~= ARGV[2] then
  return {0, tonumber(epoch or 0), owner or ''}
end
if parked then
  return {1, tonumber(epoch), owner}
end
redis.call('HSET', LEADER, 'lease_ms', ARGV[3],
  'expires_ms', string.format('%.0f', server_ms() + ARGV[3]))
return {1, tonumber(epoch), owner}
