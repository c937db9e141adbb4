#!lua
-- Included by the scripts of a leader: refuses the call of a planner that no longer leads. LEADER
-- is the key `leader`, and ARGV[1] the epoch of the caller. Includes server_time.lua.

-- include: turnstream.store.run/server_time.lua

if redis.call('HGET', LEADER, 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
