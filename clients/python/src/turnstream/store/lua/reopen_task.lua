#!lua
-- Opens a group again that a store had given to its writer as a task, and may have forgotten: as
-- open_group.lua does, and its prompt is given out as this group again.
--
-- What a store forgets is the last of what it did. So the prompt waits to be given out again, or comes
-- behind the newest that was given out; those that are passed over wait from then on, until their own
-- writers open them again, or somebody asks for a task.
--
-- Keys, all in the run's slot:
--   KEYS[1] prompts  hash  read: number -> record, added; changed: next, the newest number
--                          that was given out
--   KEYS[2] tasks    hash  group name -> number of its prompt, added
--   KEYS[3] again    zset  numbers of prompts to be given out again; removed, added
--   KEYS[4...] those of open_group.lua, in its order
-- Arguments:
--   ARGV[1] prompt_uid    ARGV[2...] those of open_group.lua, in its order
-- Reply: that of open_group.lua
-- Errors: those of open_group.lua

local PROMPTS, TASKS, AGAIN = KEYS[1], KEYS[2], KEYS[3]
local UID, NAME = ARGV[1], ARGV[2]
local THEIRS = {unpack(KEYS, 4)}
local MOST_FORGOTTEN = 1024  -- prompts that are looked at: more are not given out in some seconds

local function open_group(KEYS, ARGV)
-- include: open_group.lua
end

local function is_of(number)
  local record = redis.call('HGET', PROMPTS, number)
  local size, start = string.match(record or '', '^%d+/%d+:(%d+):()')
  return size and string.sub(record, start, start + size - 1) == UID
end

local function give_out()
  for _, number in ipairs(redis.call('ZRANGE', AGAIN, 0, MOST_FORGOTTEN - 1)) do
    if is_of(number) then
      redis.call('ZREM', AGAIN, number)
      return number
    end
  end
  local found = redis.call('HMGET', PROMPTS, 'added', 'next')
  local added, last = tonumber(found[1] or 0), tonumber(found[2] or 0)
  for newer = last + 1, math.min(added, last + MOST_FORGOTTEN) do
    local number = string.format('%.0f', newer)
    if is_of(number) then
      for passed = last + 1, newer - 1 do
        redis.call('ZADD', AGAIN, passed, string.format('%.0f', passed))
      end
      redis.call('HSET', PROMPTS, 'next', number)
      return number
    end
  end
end

-- Whether the group may be in a batch yet: of one that is over, the prompt is done or waits.
local function is_under_way()
  local state = string.match(redis.call('HGET', THEIRS[3], NAME) or '', '^%d+:(.*)$')
  return state == 'open' or state == 'decided'
end

local reply = open_group(THEIRS, {unpack(ARGV, 2)})
if not reply.err and is_under_way() and redis.call('HEXISTS', TASKS, NAME) == 0 then
  local number = give_out()
  if number then
    redis.call('HSET', TASKS, NAME, number)
  end
end
return reply
