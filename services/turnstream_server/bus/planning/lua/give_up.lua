#!lua flags=allow-oom
-- Gives up open trajectories whose lease has ended, each with a reason. Whoever renewed its lease
-- meanwhile, or took the trajectory over, keeps it. Where the clock was set back behind the time to
-- judge by, leases that were renewed since end before it too: all are kept.
--
-- Runs also when the server is full: giving up makes room.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader  hash    read: epoch
--   KEYS[2] ledger  hash    trajectory id: "open:<epoch>:<writer>" becomes "abandoned:<reason>"
--   KEYS[3] leases  zset    read, and removed: their leases
--   KEYS[4] counts  hash    changed: open, abandoned
--   KEYS[5] events  stream  added per trajectory: field r = the trajectory_abandoned record
-- Arguments:
--   ARGV[1] leader epoch
--   ARGV[2] only leases that ended at this time or before, ms of server time
--   ARGV[3...] four per trajectory: its id, lease epoch, reason, record
-- Reply: per trajectory, in order: 1, or 0 where it was kept, or given up before
-- Errors:    FENCED  another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local time = redis.call('TIME')
local until_ms = tonumber(ARGV[2])
if until_ms > time[1] * 1000 + math.floor(time[2] / 1000) then
  until_ms = -math.huge
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(KEYS[4])
if damage then
  return damage
end
local replies = {}
local num_given_up = 0
for i = 3, #ARGV, 4 do
  local id = ARGV[i]
  local lease_end = tonumber(redis.call('ZSCORE', KEYS[3], id) or 'inf')
  local epoch = string.match(redis.call('HGET', KEYS[2], id) or '', '^open:(%d+):')
  if epoch == ARGV[i + 1] and lease_end <= until_ms then
    redis.call('HSET', KEYS[2], id, 'abandoned:' .. ARGV[i + 2])
    redis.call('ZREM', KEYS[3], id)
    redis.call('XADD', KEYS[5], '*', 'r', ARGV[i + 3])
    num_given_up = num_given_up + 1
    replies[#replies + 1] = 1
  else
    replies[#replies + 1] = 0
  end
end
if num_given_up > 0 then
  redis.call('HINCRBY', KEYS[4], 'open', -num_given_up)
  redis.call('HINCRBY', KEYS[4], 'abandoned', num_given_up)
end
return replies
