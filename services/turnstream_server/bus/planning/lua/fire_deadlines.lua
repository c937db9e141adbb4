#!lua flags=allow-oom
-- Writes the events of deadlines that have passed, by the run's clock, and says which have passed
-- and were not written: the events are records, which the caller makes.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader     hash    read: epoch
--   KEYS[2] deadlines  zset    removed: what is written; moved: what would fire later than one that
--                              was set now
--   KEYS[3] members    hash    read: group name -> "<num_needed>:<highest attempt>:<refills>:..."
--   KEYS[4] events     stream  added per deadline: field r = the deadline_fired record
--   KEYS[5] config     hash    read: newest, and that revision's JSON
--   KEYS[6] rewards    hash    trajectory id -> "missed", where its reward was waited for; added
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] the run's time, ms    ARGV[3] how many to name at most
--   ARGV[4...] three per deadline: its member, the refills of its group, the record
-- Reply: {how many were written; ms until the next one is due, 0 where one is, -1 without any; then
--         two per deadline that is due: its member, the refills of its group}
-- Errors:
--   FENCED    another planner leads

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local now_ms = tonumber(ARGV[2])
local config = cjson.decode(redis.call('HGET', KEYS[5], redis.call('HGET', KEYS[5], 'newest')))

local function num_refills(member)
  local group = string.match(member, '^group:(.*)$')
  local entry = group and redis.call('HGET', KEYS[3], group)
  return entry and string.match(entry, '^%d+:%d+:(%d+)') or '0'
end

-- 1. Write. A deadline that a refill has moved meanwhile is another one.
local num_written = 0
for i = 4, #ARGV, 3 do
  local due_ms = redis.call('ZSCORE', KEYS[2], ARGV[i])
  if due_ms and tonumber(due_ms) <= now_ms and num_refills(ARGV[i]) == ARGV[i + 1] then
    redis.call('ZREM', KEYS[2], ARGV[i])
    redis.call('XADD', KEYS[4], '*', 'r', ARGV[i + 2])
    local awaited = string.match(ARGV[i], '^reward:(.*)$')
    if awaited then
      redis.call('HSET', KEYS[6], awaited, 'missed')
    end
    num_written = num_written + 1
  end
end

-- 2. The run has shorter deadlines now, or they were set with less of its time than has passed: count
-- from now.
local longest_s = math.max(config.group_deadline_s or 0, config.reward_deadline_s or 0)
if longest_s > 0 then
  local latest_ms = string.format('%.0f', now_ms + longest_s * 1000)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. latest_ms, '+inf',
      'LIMIT', 0, ARGV[3])) do
    redis.call('ZADD', KEYS[2], latest_ms, member)
  end
end

-- 3. What is due now, and when the next one is.
local reply = {num_written, -1}
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now_ms),
  'LIMIT', 0, ARGV[3])
for _, member in ipairs(due) do
  reply[#reply + 1] = member
  reply[#reply + 1] = num_refills(member)
end
if #due > 0 then
  reply[2] = 0
else
  local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
  if first[2] then
    reply[2] = first[2] - now_ms  -- not due, so above 0
  end
end
return reply
