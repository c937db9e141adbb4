#!lua flags=allow-oom
-- Notes that the compact records of some batches are in a file, and removes them here.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash  read: epoch
--   KEYS[2] frontier  hash  read: folded; changed: cold, the newest step that is in a file
--   KEYS[3] past      hash  removed: the steps
--   KEYS[4] cold      hash  added: the last step -> name of the file
-- Arguments: ARGV[1] leader epoch    ARGV[2] first step    ARGV[3] last step    ARGV[4] name
-- Reply:     1, or 0 where it was done before
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  the first step is not the next one, or the last one has no compact record

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local first, last = tonumber(ARGV[2]), tonumber(ARGV[3])
local folded, cold = unpack(redis.call('HMGET', KEYS[2], 'folded', 'cold'))
folded, cold = tonumber(folded or 0), tonumber(cold or 0)
if last <= cold then
  return 0
end
if first ~= cold + 1 or last > folded then
  return redis.error_reply('CONFLICT steps ' .. first .. ' to ' .. last .. ' are not next: step '
    .. cold .. ' is in a file, step ' .. folded .. ' is folded')
end
for step = first, last do
  redis.call('HDEL', KEYS[3], string.format('%.0f', step))
end
redis.call('HSET', KEYS[4], ARGV[3], ARGV[4])
redis.call('HSET', KEYS[2], 'cold', ARGV[3])
return 1
