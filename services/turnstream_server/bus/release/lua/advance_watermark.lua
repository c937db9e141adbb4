#!lua flags=allow-oom
-- Advances the low watermark: the newest step that no kept checkpoint can ask for, and that every
-- live observer has seen. Sessions that need an earlier step are refused from here on, so that any
-- planner may delete its payload later.
--
-- Arguments: ARGV[1] leader epoch    ARGV[2] the newest step that may be released, "" for any
-- Reply:     the low watermark

local LEADER, FRONTIER, CONFIG, OBSERVERS = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local released, checkpoints = unpack(redis.call('HMGET', FRONTIER, 'released', 'checkpoints'))
local config = cjson.decode(redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')))
local steps = {}
for step in string.gmatch(checkpoints or '', '%d+') do
  steps[#steps + 1] = tonumber(step)
end
local first_kept = math.max(1, #steps - (config.retain_checkpoints or 2) + 1)

-- Everybody who may still ask for a step holds the floor at it: the least of these counts.
local floor = math.min(tonumber(ARGV[2]) or math.huge,
  #steps >= (config.retain_checkpoints or 2) and steps[first_kept] or 0)

for _, entry in ipairs(redis.call('HVALS', OBSERVERS)) do
  local seen, expires_ms = string.match(entry, '^(%d+):(%d+):')
  if expires_ms ~= '0' then
    floor = math.min(floor, tonumber(seen))
  end
end

released = tonumber(released or 0)
if floor <= released then
  return released
end
redis.call('HSET', FRONTIER, 'released', string.format('%.0f', floor),
  'checkpoints', table.concat(steps, ',', first_kept))
return floor
