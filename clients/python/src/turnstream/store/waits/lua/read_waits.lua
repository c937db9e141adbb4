#!lua flags=no-writes
-- Reads the state of a run from which the reasons for waiting follow, at one time. Bounded reads.
--
-- Arguments: ARGV[1] maximum of leases    ARGV[2] maximum of group deadlines, and of refills
-- Reply: name, value, ... as below. `version_id` is empty before the first version; `ranks` is empty
--        unless a planned step awaits the trainer. Some values are lists:
--   oldest_refills: trajectory id, time in ms, ...
--   server: bytes that it uses, its maxmemory, aof_last_write_status
--   leases: four per lease, in the order of their ends: trajectory id, end in ms, ledger entry or
--           false, ms left until the group's deadline or false
--   step_times: when the newest step was stepped, when the next was planned

local FRONTIER, CONFIG, LEADER, BUDGET, PROMPTS, AGAIN, LEASES, LEDGER, REFILLS, VERSIONS, COUNTS,
  DEADLINES, CLOCK, TIMES, RANKS, EVENTS, WAKE = unpack(KEYS)
local stepped, planned = unpack(redis.call('HMGET', FRONTIER, 'stepped', 'planned'))
if not stepped then
  return redis.error_reply('NORUN no such run')
end

-- include: turnstream.store.run/run_clock.lua

local function server_state()
  local memory = redis.pcall('INFO', 'memory')
  local persistence = redis.pcall('INFO', 'persistence')
  if type(memory) ~= 'string' or type(persistence) ~= 'string' then
    return {0, 0, false}
  end
  return {string.match(memory, 'used_memory:(%d+)') or 0,
    string.match(memory, '\nmaxmemory:(%d+)') or 0,
    string.match(persistence, 'aof_last_write_status:(%w+)') or false}
end

local function members()
  local ends = redis.call('ZRANGE', LEASES, 0, ARGV[1] - 1, 'WITHSCORES')
  local found = {}
  for i = 1, #ends, 2 do
    local at = #found
    found[at + 1] = ends[i]
    found[at + 2] = ends[i + 1]
    found[at + 3] = redis.call('HGET', LEDGER, ends[i])
    local due_ms = (i - 1) / 2 < tonumber(ARGV[2])
      and redis.call('ZSCORE', DEADLINES, 'group:' .. string.match(ends[i], '^[^/]*'))
    found[at + 4] = due_ms and string.format('%.0f', due_ms - run_ms())
  end
  return found
end

local function last_id(stream, default)
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  return last and last[1] or default
end

local awaits_trainer = tonumber(planned or 0) > tonumber(stepped)
return {
  'now_ms', now_text(),
  'version_id', last_id(VERSIONS, ''),
  'frontier', redis.call('HGETALL', FRONTIER),
  'leader', redis.call('HGETALL', LEADER),
  'budget', redis.call('HGETALL', BUDGET),
  'counts', redis.call('HGETALL', COUNTS),
  'ranks', awaits_trainer and redis.call('HGETALL', RANKS) or {},
  'config', redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')),
  'prompts', redis.call('HMGET', PROMPTS, 'added', 'next', 'done', 'filtered'),
  'num_again', redis.call('ZCARD', AGAIN),
  'num_refills', redis.call('ZCARD', REFILLS),
  'num_leases', redis.call('ZCARD', LEASES),
  'last_ids', {last_id(EVENTS, '0-0'), last_id(WAKE, '0-0')},
  'oldest_refills', redis.call('ZRANGE', REFILLS, 0, ARGV[2] - 1, 'WITHSCORES'),
  'server', server_state(),
  'leases', members(),
  'step_times', redis.call('HMGET', TIMES, 'stepped:' .. stepped,
    string.format('planned:%.0f', stepped + 1)),
}
