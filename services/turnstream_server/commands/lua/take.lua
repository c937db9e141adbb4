#!lua flags=allow-oom
-- Return the commands that run next, and record which of them share a pass.
-- KEYS  model, commands, bodies, results, passes
-- ARGV  epoch, number that the worker has reached, ms for which a missing number is awaited,
--       most commands of a pass, most bytes of a pass, beginning and end of the result of lost
--       commands
-- Reply {run, first, last, kind}, {idle}, {gap, missing number, ms left},
--       {lost, missing number, failed numbers..}, {fenced}, {ended} or {behind}
-- Runs also when the server is full: only finished commands can be covered and deleted.

-- include: check_worker.lua
-- include: skip_finished.lua

local submitted = tonumber(state[4])
first = skip_finished(KEYS[1], KEYS[4], first)
local entry = redis.call('HGET', KEYS[2], first)
if not entry then
  if submitted < first then
    return {'idle'}
  end
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  if tonumber(state[5] or -1) ~= first then
    redis.call('HSET', KEYS[1], 'gap_seq', first, 'gap_ms', now)
    return {'gap', first, tonumber(ARGV[3])}
  end
  local left = tonumber(state[6]) + ARGV[3] - now
  if left > 0 then
    return {'gap', first, left}
  end
  local reply = {'lost', first}
  for number = first, submitted do
    if redis.call('HEXISTS', KEYS[4], number) == 0 then
      redis.call('HSETNX', KEYS[2], number, 'missing')
      redis.call('HSET', KEYS[4], number, ARGV[6] .. first .. ARGV[7])
      redis.call('HDEL', KEYS[3], number)
      table.insert(reply, number)
    end
  end
  redis.call('HSET', KEYS[1], 'next', submitted + 1)
  return reply
end
local kind = entry:match('^%S+')
local last = first
if kind == 'forward_backward' or kind == 'forward' then
  local planned = redis.call('HGET', KEYS[5], first)
  if planned then
    last = tonumber(planned)
  else
    local bytes = redis.call('HSTRLEN', KEYS[3], first)
    while last - first + 1 < tonumber(ARGV[4]) do
      local after = redis.call('HGET', KEYS[2], last + 1)
      bytes = bytes + redis.call('HSTRLEN', KEYS[3], last + 1)
      if not after or after:match('^%S+') ~= kind or bytes > tonumber(ARGV[5])
        or redis.call('HEXISTS', KEYS[4], last + 1) == 1 then
        break
      end
      last = last + 1
    end
    redis.call('HSET', KEYS[5], first, last)
  end
end
return {'run', first, last, kind}
