#!lua flags=allow-oom
-- Expires observers that were silent for too long: no step is kept for them. The newest step that
-- they had seen stays stored, for a limited number of them.
--
-- Arguments: ARGV[1] leader epoch    ARGV[2] the run's time, ms
--            ARGV[3] number of expired observers that stay stored
-- Reply:     {ms until the next one expires, -1 where none is left; then three per observer that
--            this
--            call expired: its name, the newest step that it has seen, its expiry in ms}

local LEADER, OBSERVERS = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local now_ms = tonumber(ARGV[2])
local next_ms = math.huge
local forgotten = {}
local reply = {-1}
local observers = redis.call('HGETALL', OBSERVERS)
for i = 1, #observers, 2 do
  local name = observers[i]
  local seen, expires_ms, expiry_ms, missed, owner = string.match(
    observers[i + 1], '^(%d+):(%d+):(%d+):?(%d*)(@?.*)$')
  seen, expires_ms = tonumber(seen), tonumber(expires_ms)
  if expires_ms > now_ms then
    next_ms = math.min(next_ms, expires_ms - now_ms)
  else
    if expires_ms > 0 then
      seen = missed == '' and seen or missed - 1
      redis.call('HSET', OBSERVERS, name, string.format('%.0f:0:%s', seen, expiry_ms) .. owner)
      reply[#reply + 1] = name
      reply[#reply + 1] = seen
      reply[#reply + 1] = tonumber(expiry_ms)
    end
    forgotten[#forgotten + 1] = {name, seen}
  end
end
table.sort(forgotten, function(one, other) return one[2] > other[2] end)
for i = tonumber(ARGV[3]) + 1, #forgotten do
  redis.call('HDEL', OBSERVERS, forgotten[i][1])
end
if next_ms < math.huge then
  reply[1] = math.ceil(next_ms)
end
return reply
