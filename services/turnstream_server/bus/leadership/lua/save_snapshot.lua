#!lua flags=allow-oom
-- Keeps what the planner knows after an event, so that its successor need not hear the events
-- before it.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash  read: epoch
--   KEYS[2] snapshot  hash  changed: position, step, record, which never fall; before, the position
--                           before; read: withdrawn_at
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] id of the event    ARGV[3] the newest plan that it includes
--   ARGV[4] the record
-- Reply:  1, or 0 where a later one is kept: a call that came late, in the term of the same leader
-- Errors: FENCED  another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end

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
  redis.call('HMGET', KEYS[2], 'position', 'step', 'withdrawn_at'))
before, step = before or '0-0', tonumber(step or 0)
if is_later(before, ARGV[2]) or (before == ARGV[2] and step > tonumber(ARGV[3])) then
  return 0
end
if withdrawn_at == ARGV[2] then
  return 0  -- whoever knows no more than that knows plans that are withdrawn, or the same
end
if before ~= ARGV[2] then
  redis.call('HSET', KEYS[2], 'before', before)
end
redis.call('HSET', KEYS[2], 'position', ARGV[2], 'step', ARGV[3], 'record', ARGV[4])
return 1
