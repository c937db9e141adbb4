#!lua flags=allow-oom
-- Ends a group that was opened to evaluate, once, and keeps what it gave. Nobody waits for what is
-- still open: it becomes surplus. Capacity does not change, for such a group never took any.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader      hash    read: epoch
--   KEYS[2] groups      hash    group name -> "<num_samples>:evaluating"; becomes "...:evaluated". One
--                               that is gone is over
--   KEYS[3] ledger      hash    trajectory id: "sealed:<epoch>" and "awaiting_reward:<epoch>" of those
--                               that count become "evaluated:<reason>"; "open:..." and the others
--                               become "surplus:<reason>"
--   KEYS[4] counts      hash    changed: open, sealed, awaiting_reward, surplus, evaluated
--   KEYS[5] members     hash    read: "<num_needed>:<highest attempt>:..."; removed with the group
--   KEYS[6] deadlines   zset    removed: those of the group and of its trajectories
--   KEYS[7] leases      zset    removed: those of trajectories that were open
--   KEYS[8] evals       hash    set: version -> record; the lowest version goes where there are too many
--   KEYS[9] evalgroups  stream  added: field r = the record of the group; the oldest go
--   KEYS[10] held       hash    removed: samples that were never opened
--   KEYS[11] budget     hash    changed: reserved
--   KEYS[12] wake       stream  added, where that made room
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] group name
--   ARGV[3] reason of those that count    ARGV[4] reason of those that do not
--   ARGV[5] record of the group, or ""    ARGV[6] its version, or "unknown"
--   ARGV[7] record of the version with this group, or "" where it is final
--   ARGV[8...] ids of the trajectories that count
-- Reply: how many trajectories were ended now, an integer; 0 the second time
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  no such group, or not one to evaluate

local MEMBERS, DEADLINES, LEASES, EVALS, EVALGROUPS = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local HELD, BUDGET, WAKE = KEYS[10], KEYS[11], KEYS[12]
local MOST_VERSIONS = 1000
local MOST_GROUPS = 10000

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local num_samples, state = string.match(redis.call('HGET', KEYS[2], ARGV[2]) or '', '^(%d+):(.*)$')
if state == 'evaluated' then
  return 0
end
if state ~= 'evaluating' then
  return redis.error_reply('CONFLICT group ' .. ARGV[2] .. ' is ' .. (state or 'unknown, or over')
    .. ', not evaluating')
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(KEYS[4]) or damaged(BUDGET)
if damage then
  return damage
end

local num = {open = 0, sealed = 0, awaiting_reward = 0, surplus = 0, evaluated = 0}
local num_ended = 0

local function settle(id, from, into, reason)
  redis.call('HSET', KEYS[3], id, into .. ':' .. reason)
  redis.call('ZREM', DEADLINES, 'reward:' .. id)
  redis.call('ZREM', LEASES, id)
  num[from] = num[from] - 1
  num[into] = num[into] + 1
  num_ended = num_ended + 1
end

-- include: give_back_unbegun.lua

local function state_of(id)
  return string.match(redis.call('HGET', KEYS[3], id) or '', '^[^:]*')
end

for i = 8, #ARGV do
  local from = state_of(ARGV[i])
  if from == 'sealed' or from == 'awaiting_reward' then
    settle(ARGV[i], from, 'evaluated', ARGV[3])
  end
end
local attempts = string.match(redis.call('HGET', MEMBERS, ARGV[2]) or '', '^%d+:(%d+)') or 0
for sample = 0, num_samples - 1 do
  for attempt = 0, tonumber(attempts) do
    local id = ARGV[2] .. '/' .. sample .. '/' .. attempt
    local from = state_of(id)
    -- Sealed and not counted: its reward came after the deadline.
    if from == 'open' or from == 'awaiting_reward' or from == 'sealed' then
      settle(id, from, 'surplus', ARGV[4])
    elseif from == '' then
      give_back(id)
    end
  end
end
for name, number in pairs(num) do
  if number ~= 0 then
    redis.call('HINCRBY', KEYS[4], name, number)
  end
end
redis.call('HSET', KEYS[2], ARGV[2], num_samples .. ':evaluated')
redis.call('HDEL', MEMBERS, ARGV[2])
redis.call('ZREM', DEADLINES, 'group:' .. ARGV[2])
if given_back > 0 then
  redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
end

local function drop_lowest_version()
  local lowest
  for _, version in ipairs(redis.call('HKEYS', EVALS)) do
    local number = tonumber(version) or -1
    if not lowest or number < (tonumber(lowest) or -1) then
      lowest = version
    end
  end
  redis.call('HDEL', EVALS, lowest)
end

if ARGV[5] ~= '' then
  redis.call('XADD', EVALGROUPS, 'MAXLEN', '~', MOST_GROUPS, '*', 'r', ARGV[5])
end
if ARGV[7] ~= '' then
  redis.call('HSET', EVALS, ARGV[6], ARGV[7])
  if redis.call('HLEN', EVALS) > MOST_VERSIONS then
    drop_lowest_version()
  end
end
return num_ended
