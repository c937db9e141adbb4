#!lua flags=allow-oom
-- Make a worker the only one that runs the log of a model.
-- KEYS  model
-- ARGV  worker, ms of the lease
-- Reply {acquired, epoch, next, covered, checkpoint}, {held, worker, ms left}, {unknown} or {ended}
-- include: turnstream.store.run/server_time.lua
local state = redis.call('HMGET', KEYS[1],
  'epoch', 'worker', 'lease_ms', 'leased_ms', 'ended', 'next', 'covered', 'checkpoint')
if not state[1] then
  return {'unknown'}
end
if state[5] then
  return {'ended'}
end
local now = server_ms()
local left = tonumber(state[3] or 0) - now
if state[2] and state[2] ~= ARGV[1] and left > 0 then
  if left > tonumber(state[4]) then
    -- The clock was set back: a worker that is gone would hold the model until it caught up.
    left = tonumber(state[4])
    redis.call('HSET', KEYS[1], 'lease_ms', now + left)
  end
  return {'held', state[2], left}
end
-- No plain count: a store that lost an acquisition would repeat its epoch for another worker.
local epoch = math.max(tonumber(state[1]) + 1, now)
redis.call('HSET', KEYS[1],
  'epoch', epoch, 'worker', ARGV[1], 'lease_ms', now + ARGV[2], 'leased_ms', ARGV[2])
return {'acquired', epoch, tonumber(state[6]), tonumber(state[7]), state[8] or ''}
