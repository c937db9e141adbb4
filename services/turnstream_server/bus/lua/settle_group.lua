#!lua flags=allow-oom
-- Ends sealed trajectories of a group untrained, with a reason. As "filtered" or "incomplete" it is
-- the whole group that is dropped, and another one may be opened in its place; "surplus" ones are
-- left over from a group that was decided without them. What was abandoned or died stays so.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash    read: epoch
--   KEYS[2] groups    hash    group name -> "<num_samples>:open" becomes "<num_samples>:<state>"
--   KEYS[3] ledger    hash    trajectory id: "sealed:<epoch>" becomes "<state>:<reason>"
--   KEYS[4] counts    hash    changed: sealed, and the state
--   KEYS[5] frontier  hash    changed: live_groups
--   KEYS[6] wake      stream  added, so that whoever waits for capacity is told
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] group name
--   ARGV[3] filtered, incomplete or surplus    ARGV[4] reason
--   ARGV[5...] ids of the group's trajectories
-- Reply: how many trajectories were ended now, an integer; 0 the second time
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  no such group, or it is planned

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local num_samples, state = string.match(redis.call('HGET', KEYS[2], ARGV[2]) or '', '^(%d+):(.*)$')
if state == ARGV[3] then
  return 0
end
local is_dropped = ARGV[3] ~= 'surplus'
if not state or (is_dropped and state ~= 'open') then
  return redis.error_reply('CONFLICT group ' .. ARGV[2] .. ' is ' .. (state or 'unknown'))
end
local num_sealed = 0
for i = 5, #ARGV do
  local entry = redis.call('HGET', KEYS[3], ARGV[i])
  if entry and string.sub(entry, 1, 7) == 'sealed:' then
    redis.call('HSET', KEYS[3], ARGV[i], ARGV[3] .. ':' .. ARGV[4])
    num_sealed = num_sealed + 1
  end
end
if num_sealed > 0 then
  redis.call('HINCRBY', KEYS[4], 'sealed', -num_sealed)
  redis.call('HINCRBY', KEYS[4], ARGV[3], num_sealed)
end
if is_dropped then
  redis.call('HSET', KEYS[2], ARGV[2], num_samples .. ':' .. ARGV[3])
  redis.call('HINCRBY', KEYS[5], 'live_groups', -1)
  redis.call('XADD', KEYS[6], 'MAXLEN', 1, '*', 'w', '')
end
return num_sealed
