#!lua flags=allow-oom
-- Ends sealed trajectories untrained, whatever becomes of their groups. What was ended before, or
-- is in a batch, stays so.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader     hash  read: epoch
--   KEYS[2] ledger     hash  trajectory id: "sealed:<epoch>" or "awaiting_reward:<epoch>" becomes
--                            "<state>:<reason>"
--   KEYS[3] counts     hash  changed: sealed, awaiting_reward, and the states
--   KEYS[4] deadlines  zset  removed: "reward:<trajectory id>"
-- Arguments:
--   ARGV[1] leader epoch
--   ARGV[2...] three per trajectory: its id, state, reason
-- Reply: how many trajectories were ended now, an integer
-- Errors:
--   FENCED    another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local num_ended = 0

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(KEYS[3])
if damage then
  return damage
end
for i = 2, #ARGV, 3 do
  local entry = redis.call('HGET', KEYS[2], ARGV[i])
  local state = string.match(entry or '', '^[^:]*')
  if state == 'sealed' or state == 'awaiting_reward' then
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1] .. ':' .. ARGV[i + 2])
    redis.call('HINCRBY', KEYS[3], state, -1)
    redis.call('HINCRBY', KEYS[3], ARGV[i + 1], 1)
    redis.call('ZREM', KEYS[4], 'reward:' .. ARGV[i])
    num_ended = num_ended + 1
  end
end
return num_ended
