#!lua flags=allow-oom
-- Lets another attempt of a sample begin, in place of one that ended or hangs. The group is open
-- again, where it was decided, and its deadline counts from now.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader     hash    read: epoch
--   KEYS[2] groups     hash    read: group name -> "<num_samples>:<state>"; the state becomes open
--   KEYS[3] ledger     hash    read: whether the attempt was opened
--   KEYS[4] members    hash    group name -> "<num_needed>:<highest attempt>:<refills granted>:
--                              <prompt_uid>"; changed or made
--   KEYS[5] refills    zset    added: the trajectory id, by server ms
--   KEYS[6] deadlines  zset    changed: "group:<group name>", where the run has such a deadline
--   KEYS[7] config     hash    read: newest, and that revision's JSON
--   KEYS[8] events     stream  added, once: field r = the refill_granted record
--   KEYS[9] wake       stream  added, to wake waiting callers
--   KEYS[10] frontier  hash    changed: open_groups
--   KEYS[11] clock     hash    read: see run_clock.lua
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] group name    ARGV[3] number of the group's refill, from 1
--   ARGV[4] trajectory id   ARGV[5] prompt_uid    ARGV[6] the record
-- Reply: 1; 0 where it was granted before, or the group needs none any more; -1 where the attempt
--        was opened by somebody: ask with a later one
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  no such group, or one that is gone, so over; or a refill before this one was not granted
--   INVALID   the trajectory is no sample of the group

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local num_samples, state = string.match(redis.call('HGET', KEYS[2], ARGV[2]) or '', '^(%d+):(.*)$')
if not state then
  return redis.error_reply('CONFLICT group ' .. ARGV[2] .. ' is unknown, or over')
end
if state ~= 'open' and state ~= 'decided' then
  return 0
end
local needed, highest, granted = string.match(
  redis.call('HGET', KEYS[4], ARGV[2]) or num_samples .. ':0:0:', '^(%d+):(%d+):(%d+):')
local of_group, sample, attempt = string.match(ARGV[4], '^([^/]*)/(%d+)/(%d+)$')
if of_group ~= ARGV[2] or tonumber(sample) >= tonumber(num_samples) then
  return redis.error_reply('INVALID trajectory ' .. ARGV[4] .. ' is none of the ' .. num_samples
    .. ' samples of group ' .. ARGV[2])
end
local number = tonumber(ARGV[3])
if number <= tonumber(granted) then
  return 0
end
if number > granted + 1 then
  return redis.error_reply('CONFLICT refill ' .. number .. ' of group ' .. ARGV[2]
    .. ' does not follow refill ' .. granted)
end
if redis.call('HEXISTS', KEYS[3], ARGV[4]) == 1 or redis.call('ZSCORE', KEYS[5], ARGV[4]) then
  return -1
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(KEYS[10], 'open_groups')
if damage then
  return damage
end

local CLOCK = KEYS[11]
-- include: turnstream.store.run/run_clock.lua

local config = cjson.decode(redis.call('HGET', KEYS[7], redis.call('HGET', KEYS[7], 'newest')))
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('HSET', KEYS[4], ARGV[2], needed .. ':' .. math.max(tonumber(highest), tonumber(attempt)) .. ':'
  .. number .. ':' .. ARGV[5])
redis.call('HSET', KEYS[2], ARGV[2], num_samples .. ':open')
if state == 'decided' then
  redis.call('HINCRBY', KEYS[10], 'open_groups', 1)
end
redis.call('ZADD', KEYS[5], string.format('%.0f', now_ms), ARGV[4])
local deadline_s = config.group_deadline_s or 0
if deadline_s > 0 then
  redis.call('ZADD', KEYS[6], string.format('%.0f', run_ms() + deadline_s * 1000),
    'group:' .. ARGV[2])
end
redis.call('XADD', KEYS[8], '*', 'r', ARGV[6])
redis.call('XADD', KEYS[9], 'MAXLEN', 1, '*', 'w', '')
return 1
