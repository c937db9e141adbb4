#!lua
-- Included by open_group: whether a new group may be opened now, and its first entries.
-- Capacity: the rule of batching/fold/capacity.py, where `trained` is the result of admitting_step. Bytes:
-- docs/decisions/0018-byte-budgets.md. A group that its writer opened before, and that a restarted store has
-- lost, needs capacity only.
--
-- The group of a prompt records that the prompt is being sampled. A restarted store may have lost that: the
-- prompts before it that were not given out are given out again. The group is refused where the store knows
-- the prompt as another group: else it would be trained twice.

-- include: server_time.lua

local FIRST_ESTIMATE = 65536  -- bytes of a trajectory, before any is sealed
local LEAST_ESTIMATE = 16384  -- up to here a writer need not ask for more, see store/run/groups.py
local LONGEST_GAP = 10000     -- prompts, from the newest that was given out to the next
local RESERVE = 0.2           -- of the server's memory

local function usual_bytes()
  return math.max(LEAST_ESTIMATE, tonumber(redis.call('HGET', BUDGET, 'estimate') or FIRST_ESTIMATE))
end

local function shortage()
  if paused then
    return 'the run is paused' .. (paused == '' and '' or ': ' .. paused)
  end
  local trained = stepped
  if announced then
    trained = math.max(announced, stepped - math.max(1, config.max_staleness))
    trained = string.format('%.0f', math.min(stepped, trained))
  end
  local most = (planned_groups or 0)
    + (config.max_staleness + trained + 1 - (planned or 0)) * config.batch_groups
  if most - live <= 0 then
    return live .. ' groups are live, ' .. most .. ' are allowed after step ' .. trained
      .. (trained == stepped and ''
        or '; step ' .. stepped .. ' is stepped, and its weights are not announced')
  end
  local most_open = config.max_open_groups or 0
  if most_open > 0 and most_open - (open or 0) <= 0 then
    return open .. ' groups are open, max_open_groups is ' .. most_open
  end
end

local function server_memory()
  local info = redis.pcall('INFO', 'memory')
  info = type(info) == 'string' and info or ''
  return function(name)
    local _, last = string.find(info, '\n' .. name .. ':', 1, true)
    return last and tonumber(string.match(info, '^%d+', last + 1)) or 0
  end
end

-- The code and the reason.
local function byte_refusal(usual)
  local most, bytes = config.max_bytes or 0, samples * usual
  local of_server = server_memory()
  local used, memory = of_server('used_memory'), of_server('maxmemory')
  local needs = string.format('%.0f bytes, %.0f for each of its %.0f trajectories', bytes, usual, samples)
  if begins == 'evaluating' and most > 0 and bytes > most then
    return 'TOOLARGE', string.format('%s; max_bytes is %.0f: evaluate with fewer samples, or raise it',
      needs, most)
  end
  local usable = memory * (1 - (begins == 'open' and RESERVE / 2 or RESERVE))
    - of_server('used_memory_startup')
  if memory > 0 and bytes > usable then
    return 'TOOLARGE', string.format('%s; of the %.0f bytes of the server it may have %.0f', needs,
      memory, math.floor(usable))
  end
  local starves = begins == 'open' and tonumber(planned or 0) <= tonumber(stepped)
    and live - (planned_groups or 0) < config.batch_groups
  local parts = redis.call('HMGET', BUDGET, 'reserved', 'stored', 'planned')
  local by = string.format('%.0f bytes by open trajectories, %.0f by sealed ones, %.0f by planned '
    .. 'steps; the group needs %s', parts[1] or 0, parts[2] or 0, parts[3] or 0, needs)
  local held = (parts[1] or 0) + (parts[2] or 0) + (parts[3] or 0)
  if most > 0 and held + bytes > most and not starves then
    return 'WAIT', string.format('%.0f of max_bytes=%.0f are held: %s', held, most, by)
  end
  usable = memory * (1 - (starves and RESERVE / 2 or RESERVE))
  if memory > 0 and used + (parts[1] or 0) + bytes > usable then
    local limit = used >= memory and 'and it refuses writes'
      or string.format('of which new groups may have %.0f', usable)
    return 'WAIT', string.format('the store is full: it uses %.0f bytes, maxmemory is %.0f, %s; held are %s',
      used, memory, limit, by)
  end
end

-- Whether the store has the prompt of a new group, whether it is sampled again, and the newest opened
-- prompt. A store that lost a prompt opens its group as one without. Another prompt may have
-- got the number since. The record of a finished prompt is deleted.
local function read_prompt()
  if number == '' then
    return false, false, 0
  end
  local added, last, record = unpack(redis.call('HMGET', PROMPTS, 'added', 'next', number))
  local uid = string.match(record or '', '^%d+/%d+:([^:]*):')
  local is_known = tonumber(number) <= tonumber(added or 0)
    and (not uid or uid == string.match(NAME, '^(.*)%%23%d+$'))
  return is_known, redis.call('ZSCORE', AGAIN, number), tonumber(last or 0)
end

local function group_refusal(usual, is_new_prompt, last_prompt)
  if is_finished_name(NAME) then
    return redis.error_reply('CONFLICT [name] group ' .. NAME .. ' is finished: a name is used once')
  end
  if is_new_prompt and tonumber(number) <= last_prompt then
    return redis.error_reply('CONFLICT group ' .. NAME .. ' is of a prompt that the store continues '
      .. 'as an earlier group, or has trained as one')
  end
  if is_new_prompt and number - last_prompt > LONGEST_GAP then
    return redis.error_reply(string.format('INVALID prompt %s of group %s is above %.0f: %.0f is the newest '
      .. 'that was given out, and at most %.0f are passed over', number, NAME, last_prompt + LONGEST_GAP,
      last_prompt, LONGEST_GAP - 1))
  end
  if closed ~= '0' then
    return redis.error_reply('CLOSED the run takes no new group')
  end
  local code, why
  if again == '' then
    code, why = byte_refusal(usual)
  end
  if code == 'TOOLARGE' then
    return redis.error_reply('TOOLARGE group ' .. NAME .. ' needs ' .. why)
  end
  why = begins == 'open' and shortage() or why
  if why then
    local last = redis.call('XREVRANGE', WAKE, '+', '-', 'COUNT', 1)[1]
    local wake_id = last and last[1] or '0-0'
    if number ~= '' and again == '' then
      return {'WAIT', wake_id, why}
    end
    return redis.error_reply('WAIT [' .. wake_id .. '] ' .. why)
  end
end

local function start_prompt(is_repeated, last_prompt)
  if is_repeated then
    redis.call('ZREM', AGAIN, number)
  else
    local passed = {}
    for earlier = last_prompt + 1, number - 1 do
      add(passed, earlier, string.format('%.0f', earlier))
    end
    write_sliced('ZADD', AGAIN, passed)
    redis.call('HSET', PROMPTS, 'next', number)
  end
  redis.call('HSET', TASKS, NAME, number)
end

-- Registers a new group, and returns its entry in `members`; or nil and the reply where it may not be opened.
local function admit_group(usual)
  local is_known, is_repeated, last_prompt = read_prompt()
  local refusal = group_refusal(usual, is_known and not is_repeated, last_prompt)
  if refusal then
    return nil, refusal
  end
  local reserved, bytes = {}, string.format('r%.0f', usual)
  for sample = 0, samples - 1 do
    add(reserved, NAME .. '/' .. sample .. '/0', bytes)
  end
  write_sliced('HSET', HELD, reserved)
  redis.call('HINCRBY', BUDGET, 'reserved', string.format('%.0f', samples * usual))
  redis.call('HSET', GROUPS, NAME, samples .. ':' .. begins)
  local members = needed .. ':0:0:'
  if needed ~= samples then
    redis.call('HSET', MEMBERS, NAME, members)
  end
  local deadline_s = config.group_deadline_s or 0
  if deadline_s > 0 then
    redis.call('ZADD', DEADLINES, string.format('%.0f', run_ms() + deadline_s * 1000), 'group:' .. NAME)
  end
  if begins == 'open' then
    for _, counter in ipairs({'live_groups', 'open_groups', 'opened_groups'}) do
      redis.call('HINCRBY', FRONTIER, counter, 1)
    end
    redis.call('HSET', FRONTIER, 'opened_ms', now_text())
  end
  redis.call('XADD', EVENTS, '*', 'r', ARGV[4])
  if is_known then
    start_prompt(is_repeated, last_prompt)
  end
  return members
end
