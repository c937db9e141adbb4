#!lua
-- Included by the scripts of the worker of a model: refuses one that must stop. KEYS[1] is the
-- model, ARGV[1] the epoch of the worker, and ARGV[2] the number that it has reached. A store that
-- is behind that number has lost its last writes, and the worker has state that no store has.
local state = redis.call('HMGET', KEYS[1],
  'epoch', 'ended', 'next', 'submitted', 'gap_seq', 'gap_ms')
if state[1] ~= ARGV[1] then
  return {'fenced'}
end
if state[2] then
  return {'ended'}
end
local first = tonumber(state[3])
if first < tonumber(ARGV[2]) then
  return {'behind'}
end
