#!lua flags=allow-oom
-- Opens a task for a writer, with its leases: an attempt that was granted as a refill, else the next
-- prompt as a new group. Prompts whose group failed come first.
--
-- The event of a new group is encoded in Python. So the first call returns an OFFER, and the second
-- has the event. If another writer took the prompt in between, the reply is another OFFER.
--
-- Runs also when the server is full: see open_group.lua.
--
-- A repeated request returns the same task: the answers of the last requests are kept in 4096
-- places, by the first digits of the request. If another request took the place, no publisher renews
-- the lease of the first, so its task is opened for another writer after it.
--
-- Keys, all in the run's slot:
--   KEYS[1] prompts  hash  read: number -> record, added, done; changed: next, the newest number
--                          that was opened as a group
--   KEYS[2] tasks    hash  group name -> number of its prompt, added; "?<place>" -> "<request>
--                          <group or trajectory of the answer>", added
--   KEYS[3] again    zset  numbers of prompts whose group failed; removed
--   KEYS[4...] those of open_group.lua, in its order
-- Arguments:
--   ARGV[1] writer    ARGV[2] request, hex digits that are used once
--   ARGV[3] name of the offered group, or empty    ARGV[4] its group_opened record
-- Reply:
--   {"TASK"; group name; num_samples; num_needed; prompt_uid of a group without a prompt; payload, nil
--    without a prompt; then two per trajectory: its id, its lease epoch or why it is not the writer's}
--   or {"OFFER"; group name; num_samples; num_needed}: call again with the record of this group
--   or {"WAIT" or "EXHAUSTED"; wake id; why}: try again when wake has a newer entry. EXHAUSTED means
--   that all prompts are done
-- Errors:
--   NORUN     no such run
--   CLOSED    the run is closed, and no refill will come
--   CONFLICT, TOOLARGE  of open_group.lua

local PROMPTS, TASKS, AGAIN = KEYS[1], KEYS[2], KEYS[3]
local THEIRS = {unpack(KEYS, 4)}
local FRONTIER, CONFIG, GROUPS = THEIRS[1], THEIRS[2], THEIRS[3]
local WAKE, MEMBERS, REFILLS, OVER = THEIRS[7], THEIRS[10], THEIRS[11], THEIRS[12]
local WRITER, REQUEST, ACCEPTED, RECORD = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local PLACE = '?' .. string.sub(REQUEST, 1, 3)
local MOST_LISTED = 32

local function open_group(KEYS, ARGV)
-- include: open_group.lua
end

-- num_samples, num_needed, encoded prompt_uid and payload of a prompt; nil where it is done.
local function prompt(number)
  local record = number and redis.call('HGET', PROMPTS, number)
  if not record then
    return nil
  end
  local samples, needed, uid, start = string.match(record, '^(%d+)/(%d+):([^:]*):()')
  return tonumber(samples), tonumber(needed), uid, string.sub(record, start)
end

local function sample_ids(name, num_samples)
  local ids = {}
  for sample = 0, num_samples - 1 do
    ids[#ids + 1] = name .. '/' .. sample .. '/0'
  end
  return ids
end

local function wait(kind, why)
  local last = redis.call('XREVRANGE', WAKE, '+', '-', 'COUNT', 1)[1]
  return {kind, last and last[1] or '0-0', why}
end

local function remember(given)
  redis.call('HSET', TASKS, PLACE, REQUEST .. ' ' .. given)
end

local function task(name, samples, needed, uid, ids, epochs)
  local _, _, _, payload = prompt(redis.call('HGET', TASKS, name))
  local reply = {'TASK', name, samples, needed, uid, payload or false}
  for i, id in ipairs(ids) do
    reply[#reply + 1] = id
    reply[#reply + 1] = epochs[i]
  end
  return reply
end

local function with_ids(words, ids)
  for _, id in ipairs(ids) do
    words[#words + 1] = id
  end
  return words
end

-- Opens trajectories of a group that is there; nil where it is over.
local function of_known_group(name, ids)
  local samples = string.match(redis.call('HGET', GROUPS, name) or '', '^%d+')
  if not samples then
    return nil
  end
  local needed, uid = string.match(
    redis.call('HGET', MEMBERS, name) or '', '^(%d+):%d+:%d+:(.*)$')
  needed = needed or samples
  ids = ids or sample_ids(name, samples)
  local size = samples .. '/' .. needed
  local epochs = open_group(THEIRS, with_ids({name, size, WRITER, ''}, ids))
  if epochs.err then
    return nil
  end
  return task(name, tonumber(samples), tonumber(needed), uid or '', ids, epochs)
end

local function given_before()
  local request, given = string.match(redis.call('HGET', TASKS, PLACE) or '', '^(%x+) (.*)$')
  if request == REQUEST then
    local group = string.match(given, '^[^/]*')
    return of_known_group(group, group ~= given and {given} or nil)
  end
end

local function next_refill()
  for _, id in ipairs(redis.call('ZRANGE', REFILLS, 0, MOST_LISTED - 1)) do
    local reply = of_known_group(string.match(id, '^[^/]*'), {id})
    if reply and type(reply[8]) == 'number' then
      remember(id)
      return reply
    end
  end
end

-- Number of the prompt to be given out; else a reply that says why there is none.
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

local function closed_reply()
  local config = cjson.decode(redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')))
  local num_open = tonumber(redis.call('HGET', FRONTIER, 'open_groups') or 0)
  if config.deadline_policy == 'refill' and num_open > 0 then
    return wait('WAIT', 'the run is closed; ' .. num_open .. ' groups are open, and may be refilled')
  end
  return redis.error_reply('CLOSED the run takes no new group')
end

-- include: finished_names.lua

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
  local samples, needed, uid = prompt(number)
  local name = free_name(uid)
  if name ~= ACCEPTED then
    return {'OFFER', name, samples, needed}
  end
  local ids = sample_ids(name, samples)
  local opened = open_group(
    THEIRS, with_ids({name, samples .. '/' .. needed, WRITER, RECORD}, ids))
  if opened.err then
    local id, why = string.match(opened.err, '^%-?WAIT %[(%S+)%] (.*)$')
    return id and {'WAIT', id, why} or opened
  end
  if redis.call('ZREM', AGAIN, number) == 0 then
    redis.call('HSET', PROMPTS, 'next', number)
  end
  redis.call('HSET', TASKS, name, number)
  remember(name)
  return task(name, samples, needed, '', ids, opened)
end

local closed = redis.call('HGET', FRONTIER, 'closed')
if not closed then
  return redis.error_reply('NORUN no such run')
end
local reply = given_before() or next_refill()
if reply then
  return reply
end
return closed ~= '0' and closed_reply() or next_prompt()
