#!lua flags=allow-oom
-- Records that the compact records of some batches are in a file, and removes them here.
--
-- Arguments: ARGV[1] leader epoch    ARGV[2] first step    ARGV[3] last step    ARGV[4] name
-- Reply:     1, or 0 where it was done before
-- Errors:    CONFLICT  the first step is not the next one, or the last one has no compact record

local LEADER, FRONTIER, PAST, COLD = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local first, last = tonumber(ARGV[2]), tonumber(ARGV[3])
local folded, cold = unpack(redis.call('HMGET', FRONTIER, 'folded', 'cold'))
folded, cold = tonumber(folded or 0), tonumber(cold or 0)
if last <= cold then
  return 0
end
if first ~= cold + 1 or last > folded then
  return redis.error_reply('CONFLICT steps ' .. first .. ' to ' .. last .. ' are not next: step '
    .. cold .. ' is in a file, step ' .. folded .. ' is folded')
end
for step = first, last do
  redis.call('HDEL', PAST, string.format('%.0f', step))
end
redis.call('HSET', COLD, ARGV[3], ARGV[4])
redis.call('HSET', FRONTIER, 'cold', ARGV[3])
return 1
