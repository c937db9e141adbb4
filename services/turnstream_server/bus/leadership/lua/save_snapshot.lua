#!lua flags=allow-oom
-- Saves the state of the planner after an event.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] id of the event    ARGV[3] the newest plan that it includes
--   ARGV[4] the record
-- Reply:  1, or 0 where a later one is stored

local LEADER, SNAPSHOT = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

-- An event id is "<ms>-<number>".
local function is_later(one, other)
  local ms, number = string.match(one, '^(%d+)-(%d+)$')
  local other_ms, other_number = string.match(other, '^(%d+)-(%d+)$')
  if ms ~= other_ms then
    return tonumber(ms) > tonumber(other_ms)
  end
  return tonumber(number) > tonumber(other_number)
end

local before, step, withdrawn_at = unpack(
  redis.call('HMGET', SNAPSHOT, 'position', 'step', 'withdrawn_at'))
before, step = before or '0-0', tonumber(step or 0)
if is_later(before, ARGV[2]) or (before == ARGV[2] and step > tonumber(ARGV[3])) then
  return 0
end
if withdrawn_at == ARGV[2] then
  return 0  -- a snapshot from before the withdrawal
end
if before ~= ARGV[2] then
  redis.call('HSET', SNAPSHOT, 'before', before)
end
redis.call('HSET', SNAPSHOT, 'position', ARGV[2], 'step', ARGV[3], 'record', ARGV[4])
return 1
