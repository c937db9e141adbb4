#!lua flags=allow-oom
-- Replaces the plan of a released batch by its compact record.
--
-- Arguments: ARGV[1] leader epoch    ARGV[2] step    ARGV[3] compact record
-- Reply:     1, or 0 where it was done before
-- Errors:    CONFLICT  the step is not released, not the next one, or not in the snapshot

local LEADER, FRONTIER, BATCHES, PLAN, PAST, SNAPSHOT, TIMES = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local step = tonumber(ARGV[2])
local released, folded = unpack(redis.call('HMGET', FRONTIER, 'released', 'folded'))
released, folded = tonumber(released or 0), tonumber(folded or 0)
if step <= folded then
  return 0
end
if step ~= folded + 1 or step > released then
  return redis.error_reply('CONFLICT step ' .. step .. ' is not next: step ' .. folded
    .. ' is folded, step ' .. released .. ' is released')
end
if step > tonumber(redis.call('HGET', SNAPSHOT, 'step') or 0) then
  return redis.error_reply('CONFLICT step ' .. step .. ' is not in the snapshot')
end
redis.call('HSET', PAST, ARGV[2], ARGV[3])
redis.call('XTRIM', PLAN, 'MINID', string.format('%.0f-0', step + 1))
redis.call('HDEL', BATCHES, string.format('%.0f', step - 1))
for _, what in ipairs({'planned', 'stepped', 'committed'}) do
  redis.call('HDEL', TIMES, string.format('%s:%.0f', what, step - 1))
end
redis.call('HSET', FRONTIER, 'folded', ARGV[2])
return 1
