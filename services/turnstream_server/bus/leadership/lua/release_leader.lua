#!lua flags=allow-oom
-- Gives the leadership back, so that the next planner need not wait for the lease to end.
--
-- Keys, in the run's slot:
--   KEYS[1] leader  hash  changed: owner becomes empty, expires_ms 0; the epoch stays
-- Arguments: ARGV[1] owner    ARGV[2] its epoch
-- Reply:     1, or 0 where it had lost or given back the leadership before

local epoch, owner = unpack(redis.call('HMGET', KEYS[1], 'epoch', 'owner'))
if owner ~= ARGV[1] or epoch ~= ARGV[2] then
  return 0
end
redis.call('HSET', KEYS[1], 'owner', '', 'expires_ms', 0)
return 1
