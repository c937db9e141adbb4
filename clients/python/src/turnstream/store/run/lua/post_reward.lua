#!lua flags=allow-oom
-- Adds the reward of a trajectory that was sealed without it, once. Runs also when the server is full:
-- a group that waits for a reward holds its payload.
--
-- Arguments: ARGV[1] trajectory id    ARGV[2] CRC of the record    ARGV[3] the record
-- Reply: "OK", "DUPLICATE", or "LATE": its group was decided before, which is counted and changes
--        nothing. "LEFT" in place of LATE for a trajectory that is no longer in the ledger, so that a
--        repeat is not recognised

local LEDGER, COUNTS, REWARDS, DEADLINES, EVENTS, CONFLICTS, FRONTIER, GROUPS, OVER = unpack(KEYS)

-- include: server_time.lua

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
  redis.call('HINCRBY', CONFLICTS, 'num', 1)
  redis.call('HSET', CONFLICTS, 'last', ARGV[1] .. ': another reward was posted', 'last_ms', now_text())
  return redis.error_reply('CONFLICT another reward was posted for ' .. ARGV[1])
end

-- include: whole_numbers.lua

local damage = damaged(COUNTS)
if damage then
  return damage
end

-- include: finished_names.lua

local function may_have_left()
  local group, sample = string.match(ARGV[1], '^([^/]*)/(%d+)')
  local num_samples, state = string.match(redis.call('HGET', GROUPS, group) or '', '^(%d+):(.*)$')
  if state then
    return not MAY_CHANGE[state] and tonumber(sample) < tonumber(num_samples)
  end
  return is_finished_name(group)
end

local entry = redis.call('HGET', LEDGER, ARGV[1])
if not entry then
  if not may_have_left() then
    return redis.error_reply('CONFLICT ' .. ARGV[1] .. ' was never opened')
  end
  redis.call('HINCRBY', COUNTS, 'late_rewards', 1)
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
  redis.call('HINCRBY', COUNTS, 'late_rewards', 1)
  return 'LATE'
end
redis.call('HSET', LEDGER, ARGV[1], 'sealed:' .. rest)
redis.call('HINCRBY', COUNTS, 'awaiting_reward', -1)
redis.call('HINCRBY', COUNTS, 'sealed', 1)
redis.call('HSET', REWARDS, ARGV[1], ARGV[2])
redis.call('ZREM', DEADLINES, 'reward:' .. ARGV[1])
redis.call('XADD', EVENTS, '*', 'r', ARGV[3], 't', ARGV[1])
return 'OK'
