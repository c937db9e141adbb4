#!lua flags=allow-oom
-- Gives a writer something to do: an attempt that was granted as a refill, else the next prompt as a
-- new group, admitted, opened and leased for it. Prompts whose group failed come first.
--
-- Runs also when the server is full: see open_group.lua.
--
-- A request that comes again, since its reply was lost, is given the same again: the answers of the
-- last requests are kept in 4096 places, by the beginning of the request. Where another request took
-- the place meanwhile, nobody keeps the lease of what was given, and so it is given out again.
--
-- Keys, all in the run's slot:
--   KEYS[1] prompts  hash  read: number -> record, added, done; changed: next, the newest number
--                          that was given out
--   KEYS[2] tasks    hash  group name -> number of its prompt, added; "?<place>" -> "<request> <what
--                          was given: a group, or a trajectory>", added
--   KEYS[3] again    zset  numbers of prompts to be given out again; removed
--   KEYS[4...] those of open_group.lua, in its order
-- Arguments:
--   ARGV[1] writer    ARGV[2] request, hex digits that are used once
-- Reply:
--   {"TASK"; group name; num_samples; num_needed; prompt_uid; payload; then two per trajectory: its
--    id, its lease epoch or why it is not the writer's}
--   or {"WAIT" or "EXHAUSTED"; wake id; why}: try again when wake has a newer entry. EXHAUSTED says
--   that every prompt is done
-- Errors:
--   NORUN     no such run
--   CLOSED    the run is closed, and no refill will come
--   CONFLICT, TOOLARGE  of open_group.lua

local PROMPTS, TASKS, AGAIN = KEYS[1], KEYS[2], KEYS[3]
local THEIRS = {unpack(KEYS, 4)}
local FRONTIER, CONFIG, GROUPS = THEIRS[1], THEIRS[2], THEIRS[3]
local WAKE, MEMBERS, REFILLS = THEIRS[7], THEIRS[10], THEIRS[11]
local WRITER, REQUEST = ARGV[1], ARGV[2]
local PLACE = '?' .. string.sub(REQUEST, 1, 3)
local MOST_LISTED = 32

local function open_group(KEYS, ARGV)
-- include: open_group.lua
end

-- The record of a group_opened event, as records/events.py and records/framing.py write it.
local function le32(number)
  return string.char(bit.band(number, 255), bit.band(bit.rshift(number, 8), 255),
    bit.band(bit.rshift(number, 16), 255), bit.rshift(number, 24))
end

local function crc32(text)
  local crcs = {}
  for nibble = 0, 15 do
    local crc = nibble
    for _ = 1, 4 do
      crc = bit.bxor(bit.rshift(crc, 1), bit.band(crc, 1) * 0xEDB88320)
    end
    crcs[nibble] = crc
  end
  local crc = -1
  for i = 1, #text do
    crc = bit.bxor(crc, string.byte(text, i))
    crc = bit.bxor(bit.rshift(crc, 4), crcs[bit.band(crc, 15)])
    crc = bit.bxor(bit.rshift(crc, 4), crcs[bit.band(crc, 15)])
  end
  return bit.bnot(crc)
end

local function varint(number)
  local low = number % 128
  if number < 128 then
    return string.char(low)
  end
  return string.char(low + 128) .. varint((number - low) / 128)
end

local function text_field(tag, text)
  return string.char(tag) .. varint(#text) .. text
end

local function opened_record(group_id, prompt_uid, num_samples, num_needed)
  local message = text_field(0x0A, group_id) .. text_field(0x12, prompt_uid)
    .. string.char(0x18) .. varint(num_samples)
  if num_needed ~= num_samples then
    message = message .. string.char(0x20) .. varint(num_needed)
  end
  local header = text_field(0x0A, message)
  local record = 'TSE\0' .. le32(#header) .. header .. string.rep('\0', -#header % 8)
  return record .. le32(crc32(record))
end

local function encoded(name)
  return (string.gsub(name, '[^%w._-]', function(byte)
    return string.format('%%%02X', string.byte(byte))
  end))
end

-- num_samples, num_needed, prompt_uid and payload of a prompt; nil where it is done.
local function prompt(number)
  local record = number and redis.call('HGET', PROMPTS, number)
  if not record then
    return nil
  end
  local samples, needed, size, start = string.match(record, '^(%d+)/(%d+):(%d+):()')
  return tonumber(samples), tonumber(needed), string.sub(record, start, start + size - 1),
    string.sub(record, start + size)
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
  local _, _, prompt_uid, payload = prompt(redis.call('HGET', TASKS, name))
  local reply = {'TASK', name, samples, needed, prompt_uid or uid, payload or ''}
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

local function config_in_force()
  return cjson.decode(redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')))
end

local function closed_reply()
  local config = config_in_force()
  local num_open = tonumber(redis.call('HGET', FRONTIER, 'open_groups') or 0)
  if config.deadline_policy == 'refill' and num_open > 0 then
    return wait('WAIT', 'the run is closed; ' .. num_open .. ' groups are open, and may be refilled')
  end
  return redis.error_reply('CLOSED the run takes no new group')
end

-- include: max_samples.lua

local function next_prompt()
  local number, none = next_number()
  if not number then
    return none
  end
  local samples, needed, uid = prompt(number)
  local too_many = why_too_many(samples, config_in_force())
  if too_many then
    return redis.error_reply('TOOLARGE prompt ' .. number .. ' (' .. encoded(uid) .. '): ' .. too_many)
  end
  local visit, name, opened = 0, nil, nil
  repeat  -- a name is used once, also of a prompt that came before
    visit = visit + 1
    name = encoded(uid .. '#' .. visit)
    opened = {err = 'CONFLICT'}
    if redis.call('HEXISTS', GROUPS, name) == 0 then
      opened = open_group(THEIRS, with_ids({name, samples .. '/' .. needed, WRITER,
        opened_record(uid .. '#' .. visit, uid, samples, needed)}, sample_ids(name, samples)))
    end
  until not (opened.err and string.match(opened.err, '^%-?CONFLICT'))
  if opened.err then
    local id, why = string.match(opened.err, '^%-?WAIT %[(%S+)%] (.*)$')
    return id and {'WAIT', id, why} or opened
  end
  if redis.call('ZREM', AGAIN, number) == 0 then
    redis.call('HSET', PROMPTS, 'next', number)
  end
  redis.call('HSET', TASKS, name, number)
  remember(name)
  return task(name, samples, needed, uid, sample_ids(name, samples), opened)
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
