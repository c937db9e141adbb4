#!lua flags=allow-oom
-- Set when results may be dropped.
-- KEYS  results of all requests, by the server ms at which they may be dropped
-- ARGV  ms from now on, 1 if an earlier time stays, then request ids
-- Reply number of request ids
-- Runs also when the server is full: results that are dropped free memory.
-- include: turnstream.store.run/server_time.lua
local due = server_ms() + ARGV[1]
for place = 3, #ARGV do
  if ARGV[2] == '1' then
    redis.call('ZADD', KEYS[1], 'LT', due, ARGV[place])
  else
    redis.call('ZADD', KEYS[1], due, ARGV[place])
  end
end
return #ARGV - 2
