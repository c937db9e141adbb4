#!lua flags=allow-oom
-- Replaces the plan of a released batch by its compact record.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash    read: epoch
--   KEYS[2] frontier  hash    read: released; changed: folded, the newest step with such a record
--   KEYS[3] batches   hash    removed: the step before, which no token can name any more
--   KEYS[4] plan      stream  removed: the entries up to the step
--   KEYS[5] past      hash    added: step -> record
--   KEYS[6] snapshot  hash    read: step, the newest plan that it includes
--   KEYS[7] times     hash    removed: those of the step before
-- Arguments: ARGV[1] leader epoch    ARGV[2] step    ARGV[3] compact record
-- Reply:     1, or 0 where it was done before
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  the step is not released, not the next one, or a planner that starts anew needs it

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local step = tonumber(ARGV[2])
local released, folded = unpack(redis.call('HMGET', KEYS[2], 'released', 'folded'))
released, folded = tonumber(released or 0), tonumber(folded or 0)
if step <= folded then
  return 0
end
if step ~= folded + 1 or step > released then
  return redis.error_reply('CONFLICT step ' .. step .. ' is not next: step ' .. folded
    .. ' is folded, step ' .. released .. ' is released')
end
if step > tonumber(redis.call('HGET', KEYS[6], 'step') or 0) then
  return redis.error_reply('CONFLICT step ' .. step .. ' is not in the snapshot')
end
redis.call('HSET', KEYS[5], ARGV[2], ARGV[3])
redis.call('XTRIM', KEYS[4], 'MINID', string.format('%.0f-0', step + 1))
redis.call('HDEL', KEYS[3], string.format('%.0f', step - 1))
for _, what in ipairs({'planned', 'stepped', 'committed'}) do
  redis.call('HDEL', KEYS[7], string.format('%s:%.0f', what, step - 1))
end
redis.call('HSET', KEYS[2], 'folded', ARGV[2])
return 1
