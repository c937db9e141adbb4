-- Create a model and the operation 0 of its log, once.
-- KEYS  model, commands, bodies
-- ARGV  `create <fingerprint>`, content, then names and values of the record
-- Reply {created, server ms of the creation}, also for a repeated call; {conflict} or {ended}
-- include: turnstream.store.run/server_time.lua
local known = redis.call('HMGET', KEYS[1], 'created_ms', 'ended')
if known[2] then
  return {'ended'}
end
if known[1] then
  if redis.call('HGET', KEYS[2], '0') ~= ARGV[1] then
    return {'conflict'}
  end
  return {'created', tonumber(known[1])}
end
local now = server_ms()
redis.call('HSET', KEYS[1], 'next', 0, 'submitted', 0, 'covered', -1, 'epoch', 0,
  'created_ms', now, 'last_request_ms', now, unpack(ARGV, 3))
redis.call('HSET', KEYS[2], '0', ARGV[1])
redis.call('HSET', KEYS[3], '0', ARGV[2])
return {'created', now}
