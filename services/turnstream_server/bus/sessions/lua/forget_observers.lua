#!lua flags=allow-oom
-- Forgets observers that were silent for longer than their expiry: nothing is kept for them any more.
-- What they had seen stays written, of a number of them, for the case that they begin again.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader     hash  read: epoch
--   KEYS[2] observers  hash  name -> "<newest step seen>:<expires_ms>:<expiry in ms>", and then
--                            ":<first step missed>"; expires_ms becomes 0; removed: of those that are
--                            forgotten, whoever has seen least
-- Arguments: ARGV[1] leader epoch    ARGV[2] the run's time, ms
--            ARGV[3] how many of those that are forgotten stay written
-- Reply:     {ms until the next one expires, -1 where none is left; then three per observer that was
--            forgotten now: its name, the newest step that it has seen, its expiry in ms}
-- Errors:    FENCED  another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local now_ms = tonumber(ARGV[2])
local next_ms = math.huge
local forgotten = {}
local reply = {-1}
local observers = redis.call('HGETALL', KEYS[2])
for i = 1, #observers, 2 do
  local name = observers[i]
  local seen, expires_ms, expiry_ms, missed = string.match(
    observers[i + 1], '^(%d+):(%d+):(%d+):?(%d*)$')
  seen, expires_ms = tonumber(seen), tonumber(expires_ms)
  if expires_ms > now_ms then
    next_ms = math.min(next_ms, expires_ms - now_ms)
  else
    if expires_ms > 0 then
      seen = missed == '' and seen or missed - 1
      redis.call('HSET', KEYS[2], name, string.format('%.0f:0:%s', seen, expiry_ms))
      reply[#reply + 1] = name
      reply[#reply + 1] = seen
      reply[#reply + 1] = tonumber(expiry_ms)
    end
    forgotten[#forgotten + 1] = {name, seen}
  end
end
table.sort(forgotten, function(one, other) return one[2] > other[2] end)
for i = tonumber(ARGV[3]) + 1, #forgotten do
  redis.call('HDEL', KEYS[2], forgotten[i][1])
end
if next_ms < math.huge then
  reply[1] = math.ceil(next_ms)
end
return reply
