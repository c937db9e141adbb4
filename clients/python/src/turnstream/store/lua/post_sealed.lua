#!lua flags=allow-oom
-- Tells the run of sealed trajectories, each of which counts only while the ledger says that it is
-- open with the epoch that sealed it. Their payload must have been acknowledged before.
--
-- Runs also when the server is full: without these few bytes nothing could ever be released.
--
-- Keys, all in the run's slot:
--   KEYS[1] ledger  hash    trajectory id: "open:<epoch>:<writer>" becomes "sealed:<epoch>", or
--                           "surplus:<reason>" where the group was decided without it
--   KEYS[2] counts  hash    changed: open, sealed, surplus
--   KEYS[3] groups  hash    read: the state of the trajectories' groups
--   KEYS[4] events  stream  added per trajectory that counts: field r = the record
--   KEYS[5] leases  zset    removed: their leases
-- Arguments: ARGV[1...] three per trajectory: its id, lease epoch, trajectory_sealed record
-- Reply: per trajectory, in order: "OK", "DUPLICATE" (it had been posted), "SURPLUS",
--        or why not ("FENCED ...")

local ids = {}
for i = 1, #ARGV, 3 do
  ids[#ids + 1] = ARGV[i]
end
local entries = redis.call('HMGET', KEYS[1], unpack(ids))
local after_seal = {sealed = 1, planned = 1, filtered = 1, expired = 1, surplus = 1,
  incomplete = 1, dead = 1}
local group_states = {}

local function is_decided(id)
  local group = string.match(id, '^[^/]*')
  if group_states[group] == nil then
    local entry = redis.call('HGET', KEYS[3], group)
    group_states[group] = entry and string.match(entry, ':(.*)$') or 'open'
  end
  return group_states[group] ~= 'open'
end

local replies = {}
local changes = {}
local num_sealed = 0
local num_surplus = 0
for i, id in ipairs(ids) do
  local entry = entries[i] or ''
  local epoch = ARGV[3 * i - 1]
  local state, rest = string.match(entry, '^([^:]*):(.*)$')
  if state == 'open' and string.match(rest, '^%d+') == epoch then
    changes[#changes + 1] = id
    redis.call('ZREM', KEYS[5], id)
    if is_decided(id) then
      changes[#changes + 1] = 'surplus:its group was decided before it was sealed'
      num_surplus = num_surplus + 1
      replies[i] = 'SURPLUS'
    else
      changes[#changes + 1] = 'sealed:' .. epoch
      num_sealed = num_sealed + 1
      redis.call('XADD', KEYS[4], '*', 'r', ARGV[3 * i])
      replies[i] = 'OK'
    end
  elseif state and after_seal[state] and (state ~= 'sealed' or rest == epoch) then
    replies[i] = 'DUPLICATE'
  elseif not state then
    replies[i] = 'FENCED ' .. id .. ' was never opened'
  else
    replies[i] = 'FENCED ' .. id .. ' is ' .. entry .. ', not open with epoch ' .. epoch
  end
end
if #changes > 0 then
  redis.call('HSET', KEYS[1], unpack(changes))
  redis.call('HINCRBY', KEYS[2], 'open', -num_sealed - num_surplus)
  if num_sealed > 0 then
    redis.call('HINCRBY', KEYS[2], 'sealed', num_sealed)
  end
  if num_surplus > 0 then
    redis.call('HINCRBY', KEYS[2], 'surplus', num_surplus)
  end
end
return replies
