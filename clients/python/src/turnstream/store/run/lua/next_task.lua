#!lua flags=no-writes
-- Reads the next task of a run: an attempt that was granted as a refill, else a prompt as a new group.
-- Prompts whose group failed come first. Several generators may read the same task; open_group opens
-- it for one of them.
--
-- Keys, all in the run's slot:
--   KEYS[1] prompts   hash    read: number -> record, added, next, done
--   KEYS[2] tasks     hash    read: group name -> number of its prompt
--   KEYS[3] again     zset    read: numbers of prompts whose group failed
--   KEYS[4] frontier  hash    read: closed, open_groups
--   KEYS[5] config    hash    read: newest, that revision's JSON
--   KEYS[6] groups    hash    read: group name -> "<num_samples>:<state>"
--   KEYS[7] ledger    hash    read: the attempt is not open
--   KEYS[8] wake      stream  read: its last id
--   KEYS[9] members   hash    read: group name -> "<num_needed>:...:<prompt_uid>"
--   KEYS[10] refills  zset    read: trajectory ids in the order in which they were granted
--   KEYS[11] over     hash    read: fingerprints of finished groups
-- Arguments: ARGV[1] "refill" for refills alone, also of a closed run; else ""
-- Reply:
--   {"TASK"; number of the prompt, 0 without one; group name; num_samples; num_needed; prompt_uid of a
--    refill; payload; trajectory id of a refill, empty for a new group}
--   or {"WAIT" or "EXHAUSTED"; wake id; why}: ask again when wake has a newer entry. EXHAUSTED: all
--   prompts are done
-- Errors:
--   NORUN     no such run
--   CLOSED    the run is closed, and no refill will come

local PROMPTS, TASKS, AGAIN, FRONTIER, CONFIG = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local GROUPS, LEDGER, WAKE, MEMBERS, REFILLS = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local OVER = KEYS[11]
local MOST_LISTED = 32

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
  for _, id in ipairs(redis.call('ZRANGE', REFILLS, 0, MOST_LISTED - 1)) do
    local name = string.match(id, '^[^/]*')
    local samples, state = string.match(redis.call('HGET', GROUPS, name) or '', '^(%d+):(.*)$')
    if state == 'open' and redis.call('HEXISTS', LEDGER, id) == 0 then
      local needed, uid = string.match(
        redis.call('HGET', MEMBERS, name) or '', '^(%d+):%d+:%d+:(.*)$')
      local number = redis.call('HGET', TASKS, name) or '0'
      local _, _, _, payload = prompt(number)
      return {'TASK', number, name, samples, needed or samples, uid or '', payload, id}
    end
  end
end

-- Number of the next prompt; else a reply that says why there is none.
local function next_number()
  local again = redis.call('ZRANGE', AGAIN, 0, 0)[1]
  if again then
    return again
  end
  local found = redis.call('HMGET', PROMPTS, 'added', 'next', 'done')
  local added, last, done = tonumber(found[1] or 0), tonumber(found[2] or 0), tonumber(found[3] or 0)
  if last < added then
    return string.format('%.0f', last + 1)
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

-- A name is used once, also for another visit of the same prompt.
local function free_name(uid)
  local visit, name = 0, nil
  repeat
    visit = visit + 1
    name = uid .. '%23' .. visit
  until redis.call('HEXISTS', GROUPS, name) == 0 and not is_finished_name(name)
  return name
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
