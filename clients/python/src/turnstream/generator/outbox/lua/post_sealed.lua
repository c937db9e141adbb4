#!lua flags=allow-oom
-- Posts stored seals to the run. Each counts only while the ledger has its trajectory open with the
-- epoch that sealed it. Runs also when the server is full: nothing is released without these bytes.
--
-- Arguments: ARGV[1...] three per trajectory: its id; "<lease epoch>:<awaits>/<bytes>:<writer>"; the
--            trajectory_sealed record. <awaits> is "awaits" if the reward is posted later, else empty.
--            <bytes> is the size of its stored records; without "/<bytes>" the reservation stays.
--            Without ":<writer>" the epoch alone is compared. ":<awaits>" may be missing if both are
-- Reply: per trajectory: "OK", "DUPLICATE", "SURPLUS" (its group was decided without it), or
--        "FENCED ...", with the fact unknown where the ledger does not have it

local LEDGER, COUNTS, GROUPS, EVENTS, LEASES, DEADLINES, CONFIG, HELD, BUDGET, CLOCK = unpack(KEYS)
local OVERHEAD = 4096  -- of keys, ledger entry, lease and events of a trajectory
local MEAN_OVER = 16

local ids, awaits_any = {}, false
for i = 1, #ARGV, 3 do
  local epoch, awaits = string.match(ARGV[i + 1] or '', '^(%d+):?(%a*)')
  if not epoch or not ARGV[i + 2] then
    return redis.error_reply('INVALID trajectory ' .. ARGV[i] .. ' has no lease epoch, or no record')
  end
  ids[#ids + 1] = ARGV[i]
  awaits_any = awaits_any or awaits ~= ''
end
local reward_deadline_s = 0
if awaits_any then
  local config = cjson.decode(redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')))
  reward_deadline_s = config.reward_deadline_s or 0
end

-- include: turnstream.store.run/slices.lua

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(COUNTS) or damaged(BUDGET)
if damage then
  return damage
end

local entries = read_sliced('HMGET', LEDGER, ids)
local reserved_of = {}
for i, held in ipairs(read_sliced('HMGET', HELD, ids)) do
  reserved_of[ids[i]] = tonumber(string.match(held or '', '^r(%d+)$'))
end
local after_seal = {sealed = 1, awaiting_reward = 1, planned = 1, filtered = 1, expired = 1,
  incomplete = 1, evaluated = 1, dead = 1}
local has_epoch = {sealed = 1, awaiting_reward = 1}
local group_states = {}

local function is_decided(id)
  local group = string.match(id, '^[^/]*')
  if group_states[group] == nil then
    local entry = redis.call('HGET', GROUPS, group)
    group_states[group] = entry and string.match(entry, ':(.*)$') or 'over'
  end
  return group_states[group] ~= 'open' and group_states[group] ~= 'evaluating'
end

-- include: turnstream.store.run/run_clock.lua

local usual, settled = unpack(redis.call('HMGET', BUDGET, 'estimate', 'settled'))
usual, settled = tonumber(usual or 0), tonumber(settled or 0)
local reserved, stored, sizes = 0, 0, {}

local function settle(id, size)
  local held = reserved_of[id]
  if not held then
    return  -- of a run that did not count
  end
  reserved_of[id] = nil
  local bytes = held
  if size ~= '' then
    bytes = size + OVERHEAD
    settled = math.min(settled + 1, MEAN_OVER)
    usual = usual + (bytes - usual) / settled
  end
  add(sizes, id, string.format('%.0f', bytes))
  reserved, stored = reserved + held, stored + bytes
end

local replies, changes, ended = {}, {}, {}
local num = {sealed = 0, awaiting_reward = 0, surplus = 0}
for i, id in ipairs(ids) do
  local entry = entries[i] or ''
  local epoch, awaits, size, writer = string.match(
    ARGV[3 * i - 1], '^(%d+):?(%a*)/?(%d*)(.*)$')
  local state, rest = string.match(entry, '^([^:]*):(.*)$')
  if state == 'open' and (rest == epoch .. writer
      or writer == '' and string.match(rest, '^%d+') == epoch) then
    ended[#ended + 1] = id
    settle(id, size)
    if is_decided(id) then
      add(changes, id, 'surplus:its group was decided before it was sealed')
      num.surplus = num.surplus + 1
      replies[i] = 'SURPLUS'
    else
      local becomes = awaits == '' and 'sealed' or 'awaiting_reward'
      add(changes, id, becomes .. ':' .. epoch)
      num[becomes] = num[becomes] + 1
      if awaits ~= '' and reward_deadline_s > 0 then
        redis.call('ZADD', DEADLINES, string.format('%.0f', run_ms() + reward_deadline_s * 1000),
          'reward:' .. id)
      end
      redis.call('XADD', EVENTS, '*', 'r', ARGV[3 * i], 't', id)
      replies[i] = 'OK'
    end
  elseif state == 'surplus' then
    replies[i] = 'SURPLUS'
  elseif state and after_seal[state] and (not has_epoch[state] or rest == epoch) then
    replies[i] = 'DUPLICATE'
  elseif not state then
    replies[i] = 'FENCED [unknown] ' .. id .. ' was never opened, or is finished'
  else
    replies[i] = 'FENCED ' .. id .. ' is ' .. entry .. ', not open with epoch ' .. epoch .. writer
  end
end
if #changes > 0 then
  write_sliced('HSET', LEDGER, changes)
  write_sliced('ZREM', LEASES, ended)
  write_sliced('HSET', HELD, sizes)
  redis.call('HINCRBY', COUNTS, 'open', -#changes / 2)
  for state, number in pairs(num) do
    if number > 0 then
      redis.call('HINCRBY', COUNTS, state, number)
    end
  end
end
if reserved > 0 then
  redis.call('HINCRBY', BUDGET, 'reserved', string.format('%.0f', -reserved))
  redis.call('HINCRBY', BUDGET, 'stored', string.format('%.0f', stored))
  redis.call('HSET', BUDGET, 'estimate', string.format('%.0f', usual), 'settled', settled)
end
return replies
