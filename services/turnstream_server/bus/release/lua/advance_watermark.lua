#!lua flags=allow-oom
-- Gives up, for good, what no checkpoint that is kept can ask for: the steps up to the oldest of the
-- last committed ones that every observer has seen which is not forgotten. From here on a session that
-- needs them is refused, so that their payload may be removed at any later time, by whoever plans the
-- run then.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader    hash  read: epoch
--   KEYS[2] frontier  hash  changed: released, checkpoints
--   KEYS[3] config    hash  read: newest, and that revision's JSON
--   KEYS[4] observers hash  read: name -> "<newest step seen>:<expires_ms, 0 for forgotten>:..."
-- Arguments: ARGV[1] leader epoch    ARGV[2] the newest step that may be given up, "" for any
-- Reply:     the newest step that is given up, an integer
-- Errors:
--   NORUN     no such run
--   FENCED    another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local stepped, released, checkpoints = unpack(
  redis.call('HMGET', KEYS[2], 'stepped', 'released', 'checkpoints'))
if not stepped then
  return redis.error_reply('NORUN no such run')
end
local config = cjson.decode(redis.call('HGET', KEYS[3], redis.call('HGET', KEYS[3], 'newest')))
local steps = {}
for step in string.gmatch(checkpoints or '', '%d+') do
  steps[#steps + 1] = tonumber(step)
end
local first_kept = math.max(1, #steps - (config.retain_checkpoints or 2) + 1)

-- Everybody who may still ask for a step holds the floor at it: the least of these counts.
local floor = math.min(tonumber(ARGV[2]) or math.huge,
  #steps >= (config.retain_checkpoints or 2) and steps[first_kept] or 0)

for _, entry in ipairs(redis.call('HVALS', KEYS[4])) do
  local seen, expires_ms = string.match(entry, '^(%d+):(%d+):')
  if expires_ms ~= '0' then
    floor = math.min(floor, tonumber(seen))
  end
end

released = tonumber(released or 0)
if floor <= released then
  return released
end
redis.call('HSET', KEYS[2], 'released', string.format('%.0f', floor),
  'checkpoints', table.concat(steps, ',', first_kept))
return floor
