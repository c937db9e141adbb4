#!lua
-- Registers a group, where it is new, and takes samples of it for one writer, with a lease.
--
-- A new group needs capacity: (max_staleness + stepped + 1) * batch_groups groups may ever have
-- been opened, not counting those that were dropped untrained. A known group never waits.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    read: stepped, closed; changed: live_groups, opened_groups
--   KEYS[2] config    hash    read: newest, and that revision's JSON
--   KEYS[3] groups    hash    group name -> "<num_samples>:<state>"; made here with state "open"
--   KEYS[4] ledger    hash    trajectory id -> "open:<epoch>:<writer>"; made here
--   KEYS[5] counts    hash    changed: accepted, open
--   KEYS[6] events    stream  added, once per group: field r = the group_opened record
--   KEYS[7] wake      stream  read: its last id
--   KEYS[8] leases    zset    trajectory id -> end of its lease; made here, renewed for its writer
-- Arguments:
--   ARGV[1] group name    ARGV[2] num_samples    ARGV[3] writer
--   ARGV[4] the group_opened record              ARGV[5...] trajectory ids
-- Reply: per trajectory id, in order: its lease epoch (integer), or why not ("CONFLICT ...")
-- Errors:
--   NORUN     no such run
--   CLOSED    a new group in a closed run
--   CONFLICT  the group was opened with another num_samples
--   WAIT      "WAIT <last wake id> <why>": no capacity; try again when wake has a newer entry

local stepped, closed, live = unpack(
  redis.call('HMGET', KEYS[1], 'stepped', 'closed', 'live_groups'))
if not stepped then
  return redis.error_reply('NORUN no such run')
end
local config = cjson.decode(redis.call('HGET', KEYS[2], redis.call('HGET', KEYS[2], 'newest')))

local group = redis.call('HGET', KEYS[3], ARGV[1])
local state = 'open'
if group then
  local num_samples
  num_samples, state = string.match(group, '^(%d+):(.*)$')
  if num_samples ~= ARGV[2] then
    return redis.error_reply('CONFLICT group ' .. ARGV[1] .. ' was opened with ' .. num_samples
      .. ' samples, not ' .. ARGV[2])
  end
else
  if closed ~= '0' then
    return redis.error_reply('CLOSED the run takes no new group')
  end
  local most = (config.max_staleness + stepped + 1) * config.batch_groups
  if most - live <= 0 then
    local last = redis.call('XREVRANGE', KEYS[7], '+', '-', 'COUNT', 1)[1]
    return redis.error_reply('WAIT ' .. (last and last[1] or '0-0') .. ' ' .. live
      .. ' groups are live, ' .. most .. ' are allowed after step ' .. stepped)
  end
  redis.call('HSET', KEYS[3], ARGV[1], ARGV[2] .. ':open')
  redis.call('HINCRBY', KEYS[1], 'live_groups', 1)
  redis.call('HINCRBY', KEYS[1], 'opened_groups', 1)
  redis.call('XADD', KEYS[6], '*', 'r', ARGV[4])
end

local num_ids = #ARGV - 4
if num_ids == 0 then
  return {}
end
local entries = redis.call('HMGET', KEYS[4], unpack(ARGV, 5))
local time = redis.call('TIME')
local lease_ms = math.floor((config.lease_s or 60) * 1000)
local lease_end = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) + lease_ms)
local replies = {}
local opened = {}
local leases = {}
for i = 1, num_ids do
  local id = ARGV[4 + i]
  local entry = entries[i]
  if entry then
    local epoch, writer = string.match(entry, '^open:(%d+):(.*)$')
    if writer == ARGV[3] then
      replies[i] = tonumber(epoch)
      leases[#leases + 1] = lease_end
      leases[#leases + 1] = id
    elseif writer then
      replies[i] = 'CONFLICT ' .. id .. ' is being written by ' .. writer
    else
      replies[i] = 'CONFLICT ' .. id .. ' is already ' .. string.match(entry, '^[^:]*')
    end
  elseif state ~= 'open' then
    replies[i] = 'CONFLICT group ' .. ARGV[1] .. ' is already ' .. state
  else
    replies[i] = 1
    opened[#opened + 1] = id
    opened[#opened + 1] = 'open:1:' .. ARGV[3]
    leases[#leases + 1] = lease_end
    leases[#leases + 1] = id
  end
end
if #leases > 0 then
  redis.call('ZADD', KEYS[8], unpack(leases))
end
if #opened > 0 then
  redis.call('HSET', KEYS[4], unpack(opened))
  redis.call('HINCRBY', KEYS[5], 'accepted', #opened / 2)
  redis.call('HINCRBY', KEYS[5], 'open', #opened / 2)
end
return replies
