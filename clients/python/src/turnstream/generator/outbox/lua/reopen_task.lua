#!lua flags=allow-oom
-- Opens a group again that a store had given to its writer as a task, and may have forgotten: as
-- open_group.lua does, and its prompt is given out as this group again.
--
-- Runs also when the server is full: see open_group.lua.
--
-- What a store forgets is the last of what it did. So the prompt waits to be given out again, or comes
-- behind the newest that was given out; those that are passed over wait from then on, until their own
-- writers open them again, or somebody asks for a task. A prompt that is given out again is so because
-- the group before has ended untrained: where the store has forgotten that, and goes on with that group,
-- or has trained it since, this one is refused. Else the prompt would be trained twice.
--
-- Keys, all in the run's slot:
--   KEYS[1] prompts  hash  read: number -> record, added; changed: next, the newest number
--                          that was given out
--   KEYS[2] tasks    hash  group name -> number of its prompt, added
--   KEYS[3] again    zset  numbers of prompts to be given out again; removed, added
--   KEYS[4...] those of open_group.lua, in its order
-- Arguments:
--   ARGV[1] encoded prompt_uid    ARGV[2...] those of open_group.lua, in its order
-- Reply: that of open_group.lua
-- Errors: those of open_group.lua, and
--   CONFLICT  an earlier group of the prompt is there, and the prompt does not wait

local PROMPTS, TASKS, AGAIN = KEYS[1], KEYS[2], KEYS[3]
local UID, NAME = ARGV[1], ARGV[2]
local THEIRS = {unpack(KEYS, 4)}
local GROUPS, OVER = THEIRS[3], THEIRS[12]
local MOST_FORGOTTEN = 1024  -- prompts that are looked at: more are not given out in some seconds

local function open_group(KEYS, ARGV)
-- include: turnstream.store.run/open_group.lua
end

local function is_of(number)
  local record = redis.call('HGET', PROMPTS, number)
  return string.match(record or '', '^%d+/%d+:([^:]*):') == UID
end

-- The number of the prompt where it is given out to nobody, and whether it was before; nil else.
local function waiting()
  for _, number in ipairs(redis.call('ZRANGE', AGAIN, 0, MOST_FORGOTTEN - 1)) do
    if is_of(number) then
      return number, true
    end
  end
  local found = redis.call('HMGET', PROMPTS, 'added', 'next')
  local added, last = tonumber(found[1] or 0), tonumber(found[2] or 0)
  for newer = last + 1, math.min(added, last + MOST_FORGOTTEN) do
    local number = string.format('%.0f', newer)
    if is_of(number) then
      return number, false
    end
  end
end

local function give_out(number, was_before)
  if was_before then
    redis.call('ZREM', AGAIN, number)
  else
    local last = tonumber(redis.call('HGET', PROMPTS, 'next') or 0)
    for passed = last + 1, number - 1 do
      redis.call('ZADD', AGAIN, passed, string.format('%.0f', passed))
    end
    redis.call('HSET', PROMPTS, 'next', number)
  end
  redis.call('HSET', TASKS, NAME, number)
end

-- include: turnstream.store.run/finished_names.lua

-- Whether the store knows a group of this prompt that came before.
local function had_another()
  local prompt, visit = string.match(NAME, '^(.*%%23)(%d+)$')
  visit = tonumber(visit or 1)
  for before = visit - 1, math.max(1, visit - MOST_FORGOTTEN), -1 do
    local name = prompt .. before
    if redis.call('HEXISTS', GROUPS, name) == 1 or is_finished_name(name) then
      return true
    end
  end
  return false
end

-- Whether the group may be in a batch yet: of one that is over, the prompt is done or waits.
local function is_under_way()
  local state = string.match(redis.call('HGET', GROUPS, NAME) or '', '^%d+:(.*)$')
  return state == 'open' or state == 'decided'
end

local is_given = redis.call('HEXISTS', TASKS, NAME) == 1
local number, was_before
if not is_given then
  number, was_before = waiting()
end
local is_unknown = not is_given and not number
if is_unknown and redis.call('HEXISTS', GROUPS, NAME) == 0 and had_another() then
  return redis.error_reply('CONFLICT group ' .. NAME .. ' is of a prompt that the store goes on with '
    .. 'as an earlier group, or has trained as one')
end
local words = {}
for i = 2, #ARGV do
  words[#words + 1] = ARGV[i]
end
local reply = open_group(THEIRS, words)
if number and not reply.err and is_under_way() then
  give_out(number, was_before)
end
return reply
