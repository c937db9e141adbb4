#!lua flags=allow-oom
-- Registers a group, where it is new, and opens samples of it for one writer, with a lease. See
-- OpenGroup in generator/requests.py.
--
-- group_admission.lua has the rule for a new group, group_members.lua that for its samples. All
-- arguments are checked before the first write. Runs also when the server is full, so that it can
-- reply WAIT: a member of a known group is some hundred bytes.
--
-- Arguments: ARGV[1] group name    ARGV[2] its size, see group_size in groups.py    ARGV[3] writer
--            ARGV[4] the group_opened record    ARGV[5...] trajectory ids
-- Reply: per trajectory id: its lease epoch (integer), or why not: "CONFLICT ...", with the fact
--        group where the group takes no member any more, the state where the trajectory is no
--        longer open, and none where another writer has it.
--        Or {"WAIT"; wake id; why} where the first opening of a prompt's group is not admitted
-- Errors with a fact:
--   CONFLICT  name: the group is finished
--   FORMAT    the format of the run, which this release does not read
--   INVALID   attempt: above the one after the highest known attempt, or too many for the group
--   WAIT      the last wake id; try again when wake has a newer entry

local FRONTIER, CONFIG, GROUPS, LEDGER, COUNTS, EVENTS, WAKE, LEASES, DEADLINES, MEMBERS, REFILLS, OVER,
  HELD, BUDGET, CLOCK, LEADER, PROMPTS, TASKS, AGAIN = unpack(KEYS)
local NAME, WRITER = ARGV[1], ARGV[3]
local RUN_FORMAT = 3  -- of runs that this release reads and writes, see records/configs.py

local stepped, closed, live, open, planned, planned_groups, paused, announced = unpack(
  redis.call('HMGET', FRONTIER, 'stepped', 'closed', 'live_groups', 'open_groups', 'planned',
    'planned_groups', 'paused', 'announced'))
if not stepped then
  return redis.error_reply('NORUN no such run')
end
local config = cjson.decode(redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')))
if config.format ~= RUN_FORMAT then
  return redis.error_reply('FORMAT [' .. string.format('%d', tonumber(config.format) or 0)
    .. '] another release wrote the run')
end

local samples, needed, purpose, again, exclusive, number =
  string.match(ARGV[2], '^(%d+)/?(%d*):?(%a*)(%+?)(!?)#?(%d*)$')
local begins = purpose == 'eval' and 'evaluating' or 'open'
needed = needed == '' and samples or needed
local group = redis.call('HGET', GROUPS, NAME)

-- include: slices.lua
-- include: whole_numbers.lua
-- include: finished_names.lua
-- include: run_clock.lua
-- include: lease_end.lua
-- include: group_members.lua
-- include: group_admission.lua

-- 1. Check the arguments.
if not group and samples and tonumber(samples) > config.max_samples then
  return redis.error_reply(string.format('TOOLARGE group %s: num_samples=%s is above max_samples=%.0f '
    .. 'of the run: use fewer samples, or revise max_samples', NAME, samples, config.max_samples))
end
local invalid = why_invalid()
if invalid then
  return redis.error_reply('INVALID ' .. invalid)
end
local num_attempts = most_attempts()
if not group and num_attempts == 0 then
  return redis.error_reply(string.format('TOOLARGE group %s: num_samples=%s with a name of %d bytes is '
    .. 'above the limit of %d: use fewer samples, or a name of at most %d bytes', NAME, samples,
    #NAME, MOST_GROUP_BYTES, MOST_GROUP_BYTES / samples))
end
local no_attempt = why_no_attempt(math.max(1, num_attempts))
if no_attempt then
  return redis.error_reply('INVALID [attempt] ' .. no_attempt)
end
local damage = damaged(COUNTS) or damaged(BUDGET)
  or damaged(FRONTIER, 'live_groups', 'open_groups', 'opened_groups')
if damage then
  return damage
end

-- 2. Admit a new group; compare a known one.
local state, usual = begins, usual_bytes()
local members, refusal
if group then
  local num_samples
  num_samples, state = string.match(group, '^(%d+):(.*)$')
  members = redis.call('HGET', MEMBERS, NAME)
  local num_needed = string.match(members or samples, '^%d+')
  if num_samples ~= samples then
    return redis.error_reply('CONFLICT group ' .. NAME .. ' was opened with ' .. num_samples
      .. ' samples, not ' .. samples)
  elseif state ~= begins and (state == 'open' or state == 'evaluating') then
    return redis.error_reply('CONFLICT group ' .. NAME .. ' is ' .. state .. ', not ' .. begins
      .. ': a group is for training or for evaluation')
  elseif num_needed ~= needed and state == 'open' then
    return redis.error_reply('CONFLICT group ' .. NAME .. ' was opened to need ' .. num_needed
      .. ' of its samples, not ' .. needed)
  end
else
  members, refusal = admit_group(usual)
  if refusal then
    return refusal
  end
end

-- 3. Open its samples.
local lease_ms = math.floor(config.lease_s * 1000)
local ends_ms = string.format('%.0f', lease_end(server_ms(), lease_ms))
local replies, has_leases = open_members(state, members, usual, ends_ms)
if group and has_leases and redis.call('HEXISTS', LEADER, 'parked') == 1 then
  redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')  -- no event says so
end
return replies
