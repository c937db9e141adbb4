#!lua flags=allow-oom
-- Ends a lease early, so that the next planner can lead at once.
--
-- Arguments: ARGV[1] owner    ARGV[2] its epoch
-- Reply:     1, or 0 where the lease had ended before

local LEADER = KEYS[1]
local epoch, owner = unpack(redis.call('HMGET', LEADER, 'epoch', 'owner'))
if owner ~= ARGV[1] or epoch ~= ARGV[2] then
  return 0
end
redis.call('HSET', LEADER, 'owner', '', 'expires_ms', 0)
return 1
