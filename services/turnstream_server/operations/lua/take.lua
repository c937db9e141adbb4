#!lua flags=allow-oom
-- Return the operations that run next, and record which of them share a pass.
-- KEYS  model, commands, bodies, results, passes
-- ARGV  epoch, number that the worker has reached, ms for which a missing number is awaited,
--       most operations of a pass, most bytes of a pass, beginning and end of the result of lost
--       operations
-- Reply {run, first, last, kind}, {idle}, {gap, missing number, ms left},
--       {lost, missing number, failed numbers..}, {fenced}, {ended} or {behind}
-- Runs also when the server is full: only finished operations can be covered and deleted.

-- include: check_worker.lua
-- include: skip_finished.lua
-- include: turnstream.store.run/server_time.lua
-- include: turnstream.store.run/slices.lua

local submitted = tonumber(state[4])
first = skip_finished(KEYS[1], KEYS[4], first)
local entry = redis.call('HGET', KEYS[2], first)
if not entry then
  if submitted < first then
    return {'idle'}
  end
  local now = server_ms()
  if tonumber(state[5] or -1) ~= first then
    redis.call('HSET', KEYS[1], 'gap_seq', first, 'gap_ms', now)
    return {'gap', first, tonumber(ARGV[3])}
  end
  local left = tonumber(state[6]) + ARGV[3] - now
  if left > 0 then
    return {'gap', first, left}
  end
  local reply, failed, results, missing = {'lost', first}, {}, {}, {}
  local result = ARGV[6] .. first .. ARGV[7]
  for number = first, submitted do
    if redis.call('HEXISTS', KEYS[4], number) == 0 then
      reply[#reply + 1] = number
      failed[#failed + 1] = number
      add(results, number, result)
    end
  end
  for i, command in ipairs(read_sliced('HMGET', KEYS[2], failed)) do
    if not command then
      add(missing, failed[i], 'missing')
    end
  end
  write_sliced('HSET', KEYS[2], missing)
  write_sliced('HSET', KEYS[4], results)
  write_sliced('HDEL', KEYS[3], failed)
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
