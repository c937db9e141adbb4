#!lua flags=allow-oom
-- Opens the group of a prompt as open_group.lua does, and records that the prompt is being sampled. A
-- refill of such a group is opened alike. A repeated call changes nothing.
--
-- Runs also when the server is full: see open_group.lua.
--
-- A store that was restarted may have lost its last writes. The writer of a task then repeats this
-- call. Prompts before it that the store has not given out yet are to be given out again. The call is
-- refused where the store knows the prompt as another group: else it would be trained twice.
--
-- Keys, all in the run's slot:
--   KEYS[1] prompts  hash  read: added, number -> record; changed: next, the newest number that was
--                          opened as a group
--   KEYS[2] tasks    hash  group name -> number of its prompt, added
--   KEYS[3] again    zset  numbers of prompts to be given out again; removed, added
--   KEYS[4...] those of open_group.lua, in its order
-- Arguments:
--   ARGV[1] number of the prompt    ARGV[2] group name    ARGV[3] size    ARGV[4...] the others of
--   open_group.lua, in its order
-- Reply: as of open_group.lua; or {"WAIT"; wake id; why} where a first opening is not admitted
-- Errors: those of open_group.lua, and
--   CONFLICT  the prompt is done, or is being sampled as another group

local PROMPTS, TASKS, AGAIN = KEYS[1], KEYS[2], KEYS[3]
local THEIRS = {unpack(KEYS, 4)}
local GROUPS, OVER = THEIRS[3], THEIRS[12]
local NUMBER, NAME, SIZE = tonumber(ARGV[1]), ARGV[2], ARGV[3]

local function open_group(KEYS, ARGV)
-- include: open_group.lua
end

-- include: finished_names.lua

local found = redis.call('HMGET', PROMPTS, 'added', 'next')
local added, last = tonumber(found[1] or 0), tonumber(found[2] or 0)
-- A store that lost the prompt opens its group as one without a prompt. Another prompt may have got
-- the number since. The record of a finished prompt is deleted.
local uid = string.match(redis.call('HGET', PROMPTS, ARGV[1]) or '', '^%d+/%d+:([^:]*):')
local is_known = NUMBER <= added and (not uid or uid == string.match(NAME, '^(.*)%%23%d+$'))
local is_new = is_known and redis.call('HEXISTS', GROUPS, NAME) == 0 and not is_finished_name(NAME)
local is_repeated = redis.call('ZSCORE', AGAIN, ARGV[1])
if is_new and not is_repeated and NUMBER <= last then
  return redis.error_reply('CONFLICT group ' .. NAME .. ' is of a prompt that the store continues '
    .. 'as an earlier group, or has trained as one')
end
local words = {}
for i = 2, #ARGV do
  words[#words + 1] = ARGV[i]
end
local reply = open_group(THEIRS, words)
if reply.err then
  local id, why = string.match(reply.err, '^%-?WAIT %[(%S+)%] (.*)$')
  return id and string.sub(SIZE, -1) ~= '+' and {'WAIT', id, why} or reply
end
if is_new then
  if is_repeated then
    redis.call('ZREM', AGAIN, ARGV[1])
  else
    for passed = last + 1, NUMBER - 1 do
      redis.call('ZADD', AGAIN, passed, string.format('%.0f', passed))
    end
    redis.call('HSET', PROMPTS, 'next', ARGV[1])
  end
  redis.call('HSET', TASKS, NAME, ARGV[1])
end
return reply
