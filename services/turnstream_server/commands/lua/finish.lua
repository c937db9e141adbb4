#!lua flags=allow-oom
-- Write the results of commands; a result that exists stays.
-- KEYS  model, commands, bodies, results
-- ARGV  epoch, number that the worker has reached, then numbers and results
-- Reply {finished, number that runs next}, {fenced}, {ended} or {behind}
-- Runs also when the server is full: only finished commands can be covered and deleted.

-- include: check_worker.lua
-- include: skip_finished.lua

for place = 3, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[2], ARGV[place]) == 0 then
    return {'behind'}
  end
end
for place = 3, #ARGV, 2 do
  local number, result = ARGV[place], ARGV[place + 1]
  if redis.call('HSETNX', KEYS[4], number, result) == 1 and result:sub(1, 1) == 'E' then
    redis.call('HDEL', KEYS[3], number)  -- without effect: it is never run again
  end
end
return {'finished', skip_finished(KEYS[1], KEYS[4], first)}
