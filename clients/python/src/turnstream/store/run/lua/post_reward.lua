#!lua flags=allow-oom
-- Adds the reward of a trajectory that was sealed without it, once.
--
-- Runs also when the server is full: a group that waits for a reward holds its payload.
--
-- Keys, all in the run's slot:
--   KEYS[1] ledger     hash    trajectory id: "awaiting_reward:<epoch>" becomes "sealed:<epoch>"
--   KEYS[2] counts     hash    changed: awaiting_reward, sealed; or late_rewards
--   KEYS[3] rewards    hash    trajectory id -> the CRC, "late:<CRC>" where it changes nothing; added.
--                              "missed" where its deadline has passed, and is not folded in yet
--   KEYS[4] deadlines  zset    removed: "reward:<trajectory id>"
--   KEYS[5] events     stream  added, once: field r = the reward_posted record, t = the id
--   KEYS[6] conflicts  hash    num, last, last_ms: changed where another reward was posted
--   KEYS[7] frontier   hash    read: whether there is such a run
--   KEYS[8] groups     hash    read, where the ledger does not have the trajectory
--   KEYS[9] over       hash    read then: fingerprints of finished groups
-- Arguments: ARGV[1] trajectory id    ARGV[2] CRC of the record    ARGV[3] the record
-- Reply: "OK", "DUPLICATE" (the same was posted before), or "LATE": its group was decided before,
--        which is counted and changes nothing. "LEFT" in place of LATE for a trajectory that is no
--        longer in the ledger: nobody knows whether this reward was posted before
-- Errors:
--   NORUN     no such run
--   CONFLICT  another reward was posted; or the trajectory is not sealed, or was sealed with its
--             reward; or it was never opened

local CONFLICTS, FRONTIER, GROUPS, OVER = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local REWARDS = KEYS[3]
local MAY_CHANGE = {open = true, decided = true, evaluating = true}

if redis.call('EXISTS', FRONTIER) == 0 then
  return redis.error_reply('NORUN no such run')
end
local known = redis.call('HGET', REWARDS, ARGV[1])
if known and known ~= 'missed' then
  if known == ARGV[2] then
    return 'DUPLICATE'
  elseif known == 'late:' .. ARGV[2] then
    return 'LATE'
  end
  local time = redis.call('TIME')
  redis.call('HINCRBY', CONFLICTS, 'num', 1)
  redis.call('HSET', CONFLICTS, 'last', ARGV[1] .. ': another reward was posted',
    'last_ms', string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
  return redis.error_reply('CONFLICT another reward was posted for ' .. ARGV[1])
end

-- include: whole_numbers.lua

local damage = damaged(KEYS[2])
if damage then
  return damage
end

-- include: finished_names.lua

-- Whether a trajectory that the ledger does not have may have been there before.
local function may_have_left()
  local group, sample = string.match(ARGV[1], '^([^/]*)/(%d+)')
  local num_samples, state = string.match(redis.call('HGET', GROUPS, group) or '', '^(%d+):(.*)$')
  if state then
    return not MAY_CHANGE[state] and tonumber(sample) < tonumber(num_samples)
  end
  return is_finished_name(group)
end

local entry = redis.call('HGET', KEYS[1], ARGV[1])
if not entry then
  if not may_have_left() then
    return redis.error_reply('CONFLICT ' .. ARGV[1] .. ' was never opened')
  end
  redis.call('HINCRBY', KEYS[2], 'late_rewards', 1)
  return 'LEFT'
end
local state, rest = string.match(entry, '^([^:]*):(.*)$')
if state == 'open' then
  return redis.error_reply('CONFLICT ' .. ARGV[1] .. ' is open: its reward comes after its seal')
end
if state == 'sealed' then
  return redis.error_reply('CONFLICT ' .. ARGV[1] .. ' was sealed with its reward')
end
if state ~= 'awaiting_reward' or known then
  redis.call('HSET', REWARDS, ARGV[1], 'late:' .. ARGV[2])
  redis.call('HINCRBY', KEYS[2], 'late_rewards', 1)
  return 'LATE'
end
redis.call('HSET', KEYS[1], ARGV[1], 'sealed:' .. rest)
redis.call('HINCRBY', KEYS[2], 'awaiting_reward', -1)
redis.call('HINCRBY', KEYS[2], 'sealed', 1)
redis.call('HSET', REWARDS, ARGV[1], ARGV[2])
redis.call('ZREM', KEYS[4], 'reward:' .. ARGV[1])
redis.call('XADD', KEYS[5], '*', 'r', ARGV[3], 't', ARGV[1])
return 'OK'
