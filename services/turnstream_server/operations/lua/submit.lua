-- Append an operation to the log of a model, once.
-- KEYS  model, commands, bodies, results
-- ARGV  number, `<kind> <fingerprint>`, content, result of a refused operation or '', most numbers
--       after the one that runs next
-- Reply {accepted}, {repeated}, {conflict}, {unknown}, {ended, reason} or {ahead, next}
-- include: turnstream.store.run/server_time.lua
local state = redis.call('HMGET', KEYS[1], 'next', 'submitted', 'ended')
if not state[1] then
  return {'unknown'}
end
local number, known = tonumber(ARGV[1]), redis.call('HGET', KEYS[2], ARGV[1])
if known then
  return {(known == ARGV[2] or known == 'missing') and 'repeated' or 'conflict'}
end
if state[3] then
  return {'ended', state[3]}
end
if number > state[1] + ARGV[5] then
  return {'ahead', tonumber(state[1])}
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
if ARGV[4] ~= '' then
  redis.call('HSET', KEYS[4], ARGV[1], ARGV[4])
else
  redis.call('HSET', KEYS[3], ARGV[1], ARGV[3])
end
if number > tonumber(state[2]) then
  redis.call('HSET', KEYS[1], 'submitted', number)
end
redis.call('HSET', KEYS[1], 'last_request_ms', server_ms())
return {'accepted'}
