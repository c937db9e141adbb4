#!lua flags=no-writes
-- Reads the state of a run from which the reasons for waiting follow, at one time. Bounded reads.
--
-- Keys, all in the run's slot, all read:
--   KEYS[1] frontier  hash    all fields
--   KEYS[2] config    hash    newest, and that revision's JSON
--   KEYS[3] leader    hash    all fields
--   KEYS[4] budget    hash    all fields
--   KEYS[5] prompts   hash    added, next, done, filtered
--   KEYS[6] again     zset    its size
--   KEYS[7] leases    zset    trajectory id -> end of its lease
--   KEYS[8] ledger    hash    trajectory id -> "open:<epoch>:<writer>"
--   KEYS[9] refills   zset    its size, and the oldest
--   KEYS[10] versions stream  its last id
--   KEYS[11] counts   hash    all fields
--   KEYS[12] deadlines zset   of groups whose members are listed
--   KEYS[13] clock    hash    see run_clock.lua
--   KEYS[14] times    hash    when the newest step was stepped, and the one after it planned
--   KEYS[15] ranks    hash    the newest request of each rank
--   KEYS[16] events   stream  its last id
--   KEYS[17] wake     stream  its last id
-- Arguments: ARGV[1] maximum of leases    ARGV[2] maximum of group deadlines, and of refills
-- Reply: name, value, ... of
--   now_ms, of the server;  version_id, the last id of versions, empty before the first;
--   frontier, leader, budget, counts, and ranks while a planned step awaits the trainer: the hashes;
--   config, its JSON;  prompts, the fields above;  num_again, num_refills, num_leases, the sizes;
--   last_ids, the last ids of events and wake;
--   oldest_refills: trajectory id, time in ms, ...;
--   server: bytes that it uses, its maxmemory, aof_last_write_status;
--   leases: four per lease, in the order of their ends: trajectory id, end in ms, ledger entry or
--           false, ms left until the group's deadline or false;
--   step_times: when the newest step was stepped, when the next was planned
-- Errors:
--   NORUN     no such run

local stepped, planned = unpack(redis.call('HMGET', KEYS[1], 'stepped', 'planned'))
if not stepped then
  return redis.error_reply('NORUN no such run')
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local CLOCK = KEYS[13]
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
  local ends = redis.call('ZRANGE', KEYS[7], 0, ARGV[1] - 1, 'WITHSCORES')
  local found = {}
  for i = 1, #ends, 2 do
    local at = #found
    found[at + 1] = ends[i]
    found[at + 2] = ends[i + 1]
    found[at + 3] = redis.call('HGET', KEYS[8], ends[i])
    local due_ms = (i - 1) / 2 < tonumber(ARGV[2])
      and redis.call('ZSCORE', KEYS[12], 'group:' .. string.match(ends[i], '^[^/]*'))
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
  'now_ms', string.format('%.0f', now_ms),
  'version_id', last_id(KEYS[10], ''),
  'frontier', redis.call('HGETALL', KEYS[1]),
  'leader', redis.call('HGETALL', KEYS[3]),
  'budget', redis.call('HGETALL', KEYS[4]),
  'counts', redis.call('HGETALL', KEYS[11]),
  'ranks', awaits_trainer and redis.call('HGETALL', KEYS[15]) or {},
  'config', redis.call('HGET', KEYS[2], redis.call('HGET', KEYS[2], 'newest')),
  'prompts', redis.call('HMGET', KEYS[5], 'added', 'next', 'done', 'filtered'),
  'num_again', redis.call('ZCARD', KEYS[6]),
  'num_refills', redis.call('ZCARD', KEYS[9]),
  'num_leases', redis.call('ZCARD', KEYS[7]),
  'last_ids', {last_id(KEYS[16], '0-0'), last_id(KEYS[17], '0-0')},
  'oldest_refills', redis.call('ZRANGE', KEYS[9], 0, ARGV[2] - 1, 'WITHSCORES'),
  'server', server_state(),
  'leases', members(),
  'step_times', redis.call('HMGET', KEYS[14], 'stepped:' .. stepped,
    string.format('planned:%.0f', stepped + 1)),
}
