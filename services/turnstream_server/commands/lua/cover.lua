#!lua flags=allow-oom
-- Delete the content of commands that a durable checkpoint covers.
-- KEYS  model, bodies, passes
-- ARGV  epoch, number that the worker has reached, number of the newest covered command, name of the
--       checkpoint
-- Reply {covered}, {fenced}, {ended} or {behind}
-- Runs also when the server is full: it frees memory.

-- include: check_worker.lua

redis.call('HSET', KEYS[1], 'covered', ARGV[3], 'checkpoint', ARGV[4])
for _, key in ipairs({KEYS[2], KEYS[3]}) do
  for _, number in ipairs(redis.call('HKEYS', key)) do
    if tonumber(number) <= tonumber(ARGV[3]) then
      redis.call('HDEL', key, number)
    end
  end
end
return {'covered'}
