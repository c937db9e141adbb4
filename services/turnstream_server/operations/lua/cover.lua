#!lua flags=allow-oom
-- Delete the content of operations that a durable checkpoint covers, some at a time.
-- KEYS  model, bodies, passes
-- ARGV  epoch, number that the worker has reached, number of the newest covered operation, name of the
--       checkpoint
-- Reply {covered, left}, {fenced}, {ended} or {behind}; call again while operations are left
-- Runs also when the server is full: it frees memory.

-- include: check_worker.lua

local SLICE = 1000  -- numbers of one call
local covered = tonumber(ARGV[3])
local swept = tonumber(redis.call('HGET', KEYS[1], 'swept') or -1)
local last = math.min(covered, swept + SLICE)
redis.call('HSET', KEYS[1], 'covered', ARGV[3], 'checkpoint', ARGV[4])
local some = {}
for number = swept + 1, last do
  some[#some + 1] = string.format('%.0f', number)
end
if #some > 0 then
  redis.call('HSET', KEYS[1], 'swept', last)
  redis.call('HDEL', KEYS[2], unpack(some))
  redis.call('HDEL', KEYS[3], unpack(some))
end
return {'covered', math.max(0, covered - last)}
