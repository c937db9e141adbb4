#!lua flags=no-writes
-- Reads the next task of a run: an attempt that was granted as a refill, else a prompt as a new group.
-- Prompts whose group failed come first. Several generators may read the same task; open_group opens
-- it for one of them.
--
-- Arguments:
--   ARGV[1] "refill" for refills alone, also of a closed run; else ""
--   ARGV[2] tasks to pass over: a caller that lost a task to another one asks for a later one. Beyond
--           the last task it counts from the first one
-- Reply:
--   {"TASK"; number of the prompt, 0 without one; group name; num_samples; num_needed; prompt_uid of a
--    refill; payload; trajectory id of a refill, empty for a new group}
--   or {"WAIT" or "EXHAUSTED"; wake id; why}: ask again when wake has a newer entry
-- Errors:    CLOSED  the run is closed, and no refill will come

local PROMPTS, TASKS, AGAIN, FRONTIER, CONFIG, GROUPS, LEDGER, WAKE, MEMBERS, REFILLS,
  OVER = unpack(KEYS)
local MOST_LISTED = 32
local num_passed = tonumber(ARGV[2] or 0)

-- include: finished_names.lua

local function prompt(number)
  local record = redis.call('HGET', PROMPTS, number) or ''
  local samples, needed, uid, start = string.match(record, '^(%d+)/(%d+):([^:]*):()')
  return samples, needed, uid, start and string.sub(record, start) or ''
end

local function wait(kind, why)
  local last = redis.call('XREVRANGE', WAKE, '+', '-', 'COUNT', 1)[1]
  return {kind, last and last[1] or '0-0', why}
end

local function next_refill()
  local open = {}
  for _, id in ipairs(redis.call('ZRANGE', REFILLS, 0, MOST_LISTED - 1)) do
    local entry = redis.call('HGET', GROUPS, string.match(id, '^[^/]*')) or ''
    local samples, state = string.match(entry, '^(%d+):(.*)$')
    if state == 'open' and redis.call('HEXISTS', LEDGER, id) == 0 then
      open[#open + 1] = {id, samples}
    end
    if #open > num_passed then
      break
    end
  end
  if #open == 0 then
    return nil
  end
  local id, samples = unpack(open[num_passed % #open + 1])
  local name = string.match(id, '^[^/]*')
  local needed, uid = string.match(redis.call('HGET', MEMBERS, name) or '', '^(%d+):%d+:%d+:(.*)$')
  local number = redis.call('HGET', TASKS, name) or '0'
  local _, _, _, payload = prompt(number)
  return {'TASK', number, name, samples, needed or samples, uid or '', payload, id}
end

local function next_number()
  local found = redis.call('HMGET', PROMPTS, 'added', 'next', 'done')
  local added, last, done = tonumber(found[1] or 0), tonumber(found[2] or 0), tonumber(found[3] or 0)
  local num_again = redis.call('ZCARD', AGAIN)
  local num_left = num_again + math.max(0, added - last)
  if num_left > 0 then
    local passed = num_passed % num_left
    if passed < num_again then
      return redis.call('ZRANGE', AGAIN, passed, passed)[1]
    end
    return string.format('%.0f', last + 1 + passed - num_again)
  end
  if added == 0 then
    return nil, wait('WAIT', 'the run was given no prompt')
  end
  if done == added then
    return nil, wait('EXHAUSTED', 'all ' .. added .. ' prompts of the run are done')
  end
  return nil, wait('WAIT', 'no prompt is left: ' .. (added - done) .. ' of ' .. added
    .. ' are given out and not done')
end

local function is_used(uid, visit)
  local name = string.format('%s%%23%.0f', uid, visit)
  return redis.call('HEXISTS', GROUPS, name) == 1 or is_finished_name(name)
end

-- A name is used once, also for another visit of the same prompt. Visits are numbered from 1 without a
-- gap, so the search doubles the number, and then halves the distance.
local function free_name(uid)
  local used, free = 0, 1
  while is_used(uid, free) do
    used, free = free, free * 2
  end
  while free - used > 1 do
    local middle = math.floor((used + free) / 2)
    if is_used(uid, middle) then
      used = middle
    else
      free = middle
    end
  end
  return string.format('%s%%23%.0f', uid, free)
end

local function next_prompt()
  local number, none = next_number()
  if not number then
    return none
  end
  local samples, needed, uid, payload = prompt(number)
  return {'TASK', number, free_name(uid), samples, needed, '', payload, ''}
end

local function closed_reply()
  local config = cjson.decode(redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')))
  local num_open = tonumber(redis.call('HGET', FRONTIER, 'open_groups') or 0)
  if config.deadline_policy == 'refill' and num_open > 0 then
    return wait('WAIT', 'the run is closed; ' .. num_open .. ' groups are open, and may be refilled')
  end
  return redis.error_reply('CLOSED the run takes no new group')
end

local closed = redis.call('HGET', FRONTIER, 'closed')
if not closed then
  return redis.error_reply('NORUN no such run')
end
local refill = next_refill()
if refill or ARGV[1] == 'refill' then
  return refill or wait('WAIT', 'no attempt was granted')
end
return closed == '0' and next_prompt() or closed_reply()
