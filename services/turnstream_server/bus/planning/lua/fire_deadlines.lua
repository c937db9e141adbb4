#!lua flags=allow-oom
-- Writes the events of deadlines that have passed by the run's clock. Returns the passed ones for
-- which the caller sent no record yet.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] the run's time, ms    ARGV[3] most deadlines of one reply
--   ARGV[4...] three per deadline: its member, the refills of its group, the record
-- Reply: {number of written events; ms until the next one is due, 0 if one is, -1 without any; then
--        two per due deadline: its member, the refills of its group}

local LEADER, DEADLINES, MEMBERS, EVENTS, CONFIG, REWARDS = unpack(KEYS)

-- include: turnstream_server.bus.leadership/fenced.lua

local now_ms = tonumber(ARGV[2])
local config = cjson.decode(redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')))

local function num_refills(member)
  local group = string.match(member, '^group:(.*)$')
  local entry = group and redis.call('HGET', MEMBERS, group)
  return entry and string.match(entry, '^%d+:%d+:(%d+)') or '0'
end

-- 1. Write. A refill may have moved the deadline since.
local num_written = 0
for i = 4, #ARGV, 3 do
  local due_ms = redis.call('ZSCORE', DEADLINES, ARGV[i])
  if due_ms and tonumber(due_ms) <= now_ms and num_refills(ARGV[i]) == ARGV[i + 1] then
    redis.call('ZREM', DEADLINES, ARGV[i])
    redis.call('XADD', EVENTS, '*', 'r', ARGV[i + 2])
    local awaited = string.match(ARGV[i], '^reward:(.*)$')
    if awaited then
      redis.call('HSET', REWARDS, awaited, 'missed')
    end
    num_written = num_written + 1
  end
end

-- 2. The run has shorter deadlines now, or they were set with less of its time than has passed: count
-- from now.
local longest_s = math.max(config.group_deadline_s or 0, config.reward_deadline_s or 0)
if longest_s > 0 then
  local latest_ms = string.format('%.0f', now_ms + longest_s * 1000)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', DEADLINES, '(' .. latest_ms, '+inf',
      'LIMIT', 0, ARGV[3])) do
    redis.call('ZADD', DEADLINES, latest_ms, member)
  end
end

-- 3. Return the due deadlines, and the time until the next one.
local reply = {num_written, -1}
local due = redis.call('ZRANGEBYSCORE', DEADLINES, '-inf', string.format('%.0f', now_ms),
  'LIMIT', 0, ARGV[3])
for _, member in ipairs(due) do
  reply[#reply + 1] = member
  reply[#reply + 1] = num_refills(member)
end
if #due > 0 then
  reply[2] = 0
else
  local first = redis.call('ZRANGE', DEADLINES, 0, 0, 'WITHSCORES')
  if first[2] then
    reply[2] = first[2] - now_ms  -- not due, so above 0
  end
end
return reply
