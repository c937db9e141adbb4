#!lua flags=allow-oom
-- Renew the lease of a worker on a model, or end it.
-- KEYS  model
-- ARGV  epoch, ms of the lease; 0 ends it
-- Reply {renewed}, {fenced} or {ended}
-- include: turnstream.store.run/server_time.lua
local state = redis.call('HMGET', KEYS[1], 'epoch', 'ended')
if state[1] ~= ARGV[1] then
  return {'fenced'}
end
if ARGV[2] == '0' then
  redis.call('HDEL', KEYS[1], 'worker', 'lease_ms', 'leased_ms')
else
  local now = server_ms()
  redis.call('HSET', KEYS[1], 'lease_ms', now + ARGV[2], 'leased_ms', ARGV[2])
end
return {state[2] and 'ended' or 'renewed'}
