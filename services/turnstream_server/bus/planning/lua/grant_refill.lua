#!lua flags=allow-oom
-- Grants another attempt of a sample, in place of one that ended or hangs. A decided group is open
-- again, and its deadline restarts.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] group name    ARGV[3] number of the group's refill, from 1
--   ARGV[4] trajectory id   ARGV[5] prompt_uid    ARGV[6] the record
-- Reply: 1; 0 where it was granted before, or the group needs none; -1 where the attempt is open:
--        ask for a later one
-- Errors:
--   CONFLICT  no such group, or a finished one; or a refill before this one was not granted
--   INVALID   the trajectory is no sample of the group

local LEADER, GROUPS, LEDGER, MEMBERS, REFILLS, DEADLINES, CONFIG, EVENTS, WAKE, FRONTIER, CLOCK =
  unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local num_samples, state = string.match(redis.call('HGET', GROUPS, ARGV[2]) or '', '^(%d+):(.*)$')
if not state then
  return redis.error_reply('CONFLICT group ' .. ARGV[2] .. ' is unknown, or finished')
end
if state ~= 'open' and state ~= 'decided' then
  return 0
end
local needed, highest, granted = string.match(
  redis.call('HGET', MEMBERS, ARGV[2]) or num_samples .. ':0:0:', '^(%d+):(%d+):(%d+):')
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
if redis.call('HEXISTS', LEDGER, ARGV[4]) == 1 or redis.call('ZSCORE', REFILLS, ARGV[4]) then
  return -1
end

local COUNTERS = {{FRONTIER, 'open_groups'}}
-- include: turnstream_server.bus.leadership/whole_counters.lua
-- include: turnstream.store.run/run_clock.lua

local config = cjson.decode(redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')))
highest = math.max(tonumber(highest), tonumber(attempt))
redis.call('HSET', MEMBERS, ARGV[2], needed .. ':' .. highest .. ':'
  .. number .. ':' .. ARGV[5])
redis.call('HSET', GROUPS, ARGV[2], num_samples .. ':open')
if state == 'decided' then
  redis.call('HINCRBY', FRONTIER, 'open_groups', 1)
end
redis.call('ZADD', REFILLS, now_text(), ARGV[4])
local deadline_s = config.group_deadline_s or 0
if deadline_s > 0 then
  redis.call('ZADD', DEADLINES, string.format('%.0f', run_ms() + deadline_s * 1000),
    'group:' .. ARGV[2])
end
redis.call('XADD', EVENTS, '*', 'r', ARGV[6])
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return 1
