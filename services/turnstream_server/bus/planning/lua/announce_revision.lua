#!lua flags=allow-oom
-- Puts a revision of the config in force, when the step before its first is planned, and writes its
-- event. Runs also when the server is full.
--
-- Arguments: ARGV[1] leader epoch    ARGV[2] the revision    ARGV[3] the record
-- Reply:     1, or 0 where it was in force before
-- Errors:    CONFLICT  no such revision, or the step before its first is not planned

local LEADER, FRONTIER, CONFIG, EVENTS, WAKE, GROUPS, DEADLINES, CLOCK = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local revision = tonumber(ARGV[2])
local newest, last = unpack(redis.call('HMGET', CONFIG, 'newest', 'last'))
newest = tonumber(newest)
local planned = tonumber(redis.call('HGET', FRONTIER, 'planned') or 0)

local function first_step(number)
  return tonumber(redis.call('HGET', CONFIG, 'from:' .. number) or math.huge)
end

local function settings(number)
  return cjson.decode(redis.call('HGET', CONFIG, number))
end

-- include: turnstream.store.run/run_clock.lua
-- include: turnstream.store.run/lease_end.lua

local function start_deadlines(deadline_s)
  local due_ms = run_ms() + deadline_s * 1000
  local groups = redis.call('HGETALL', GROUPS)
  for i = 1, #groups, 2 do
    local state = string.match(groups[i + 1], '^%d+:(.*)$')
    if state == 'open' or state == 'evaluating' then
      redis.call('ZADD', DEADLINES, 'NX', string.format('%.0f', due_ms), 'group:' .. groups[i])
    end
  end
end

-- Keeps the longer leases until every live writer has received the new length.
local function keep_leases(before_ms, after_ms)
  local now_ms = server_ms()
  local floor_ms = lease_end(now_ms, before_ms)
  if after_ms < before_ms then
    redis.call('HSET', CONFIG, 'lease_floor', string.format('%.0f:%.0f', floor_ms, floor_ms - now_ms))
  end
end

local was_written = 0
if revision > newest then
  if first_step(revision) > planned + 1 then
    return redis.error_reply('CONFLICT revision ' .. revision .. ' is not due after step '
      .. planned)
  end
  local before, after = settings(newest), settings(revision)
  if (before.group_deadline_s or 0) == 0 and (after.group_deadline_s or 0) > 0 then
    start_deadlines(after.group_deadline_s)
  end
  keep_leases(before.lease_s * 1000, after.lease_s * 1000)
  local id = redis.call('XADD', EVENTS, '*', 'r', ARGV[3])
  redis.call('HSET', CONFIG, 'newest', revision, 'at:' .. revision, id)
  redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
  newest = revision
  was_written = 1
end
local next_step = newest < tonumber(last or newest) and first_step(newest + 1) or 0
redis.call('HSET', FRONTIER, 'next_revision', string.format('%.0f', next_step))
return was_written
