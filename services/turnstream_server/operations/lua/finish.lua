#!lua flags=allow-oom
-- Write the results of operations; a result that exists stays.
-- KEYS  model, commands, bodies, results
-- ARGV  epoch, number that the worker has reached, then numbers and results
-- Reply {finished, number that runs next}, {fenced}, {ended} or {behind}
-- Runs also when the server is full: only finished operations can be covered and deleted.

-- include: check_worker.lua
-- include: skip_finished.lua

local entries = {}
for place = 3, #ARGV, 2 do
  entries[place] = redis.call('HGET', KEYS[2], ARGV[place])
  if not entries[place] then
    return {'behind'}
  end
end
for place = 3, #ARGV, 2 do
  local number, result = ARGV[place], ARGV[place + 1]
  local is_new = redis.call('HSETNX', KEYS[4], number, result) == 1
  if is_new and (result:sub(1, 1) == 'E' or entries[place]:sub(1, 8) == 'forward ') then
    redis.call('HDEL', KEYS[3], number)  -- without effect: it is never run again
  end
end
return {'finished', skip_finished(KEYS[1], KEYS[4], first)}
