#!lua flags=allow-oom
-- Puts a revision of the config in force, when the step before its first is planned, and tells the
-- plan so.
--
-- Runs also when the server is full: without a plan nothing could ever be released.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader     hash    read: epoch
--   KEYS[2] frontier   hash    read: planned; changed: next_revision; revised_groups, so that the
--                              groups of the steps before still count as what they were
--   KEYS[3] config     hash    read: the revisions and their first steps, last; changed: newest;
--                              added: "at:<revision>" -> the id of the event; lease_floor, where
--                              leases are shorter from now on: see lease_end.lua
--   KEYS[4] events     stream  added, once per revision: field r = the config_revised record
--   KEYS[5] wake       stream  added, to wake replicas and waiting callers
--   KEYS[6] groups     hash    read: which are open, or evaluating
--   KEYS[7] deadlines  zset    added: those of such groups that have none, where the run had none
--   KEYS[8] clock      hash    read then: see run_clock.lua
-- Arguments: ARGV[1] leader epoch    ARGV[2] the revision    ARGV[3] the record
-- Reply:     1, or 0 where it was in force before
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  no such revision, or the step before its first is not planned

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local revision = tonumber(ARGV[2])
local newest, last = unpack(redis.call('HMGET', KEYS[3], 'newest', 'last'))
newest = tonumber(newest)
local planned = tonumber(redis.call('HGET', KEYS[2], 'planned') or 0)

local function first_step(number)
  return tonumber(redis.call('HGET', KEYS[3], 'from:' .. number) or math.huge)
end

local function settings(number)
  return cjson.decode(redis.call('HGET', KEYS[3], number))
end

local CONFIG, CLOCK = KEYS[3], KEYS[8]
-- include: turnstream.store.run/run_clock.lua

-- include: turnstream.store.run/lease_end.lua

local function give_deadlines(deadline_s)
  local due_ms = run_ms() + deadline_s * 1000
  local groups = redis.call('HGETALL', KEYS[6])
  for i = 1, #groups, 2 do
    local state = string.match(groups[i + 1], '^%d+:(.*)$')
    if state == 'open' or state == 'evaluating' then
      redis.call('ZADD', KEYS[7], 'NX', string.format('%.0f', due_ms), 'group:' .. groups[i])
    end
  end
end

-- Keeps what was leased, or is from now on, until every writer that lives has heard of the new
-- length.
local function keep_leases(before_ms, after_ms)
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
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
  redis.call('HINCRBY', KEYS[2], 'revised_groups',
    string.format('%.0f', planned * (before.batch_groups - after.batch_groups) + 0))  -- no "-0"
  if (before.group_deadline_s or 0) == 0 and (after.group_deadline_s or 0) > 0 then
    give_deadlines(after.group_deadline_s)
  end
  keep_leases(before.lease_s * 1000, after.lease_s * 1000)
  local id = redis.call('XADD', KEYS[4], '*', 'r', ARGV[3])
  redis.call('HSET', KEYS[3], 'newest', revision, 'at:' .. revision, id)
  redis.call('XADD', KEYS[5], 'MAXLEN', 1, '*', 'w', '')
  newest = revision
  was_written = 1
end
local next_step = newest < tonumber(last or newest) and first_step(newest + 1) or 0
redis.call('HSET', KEYS[2], 'next_revision', string.format('%.0f', next_step))
return was_written
