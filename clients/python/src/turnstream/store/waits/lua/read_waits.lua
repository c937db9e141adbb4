#!lua flags=no-writes
-- Reads what a generator's wait may hang on, in one moment. Bounded reads, asked for when a wait is
-- about to end without data.
--
-- Keys, all in the run's slot, all read:
--   KEYS[1] frontier  hash    the fields named below
--   KEYS[2] config    hash    newest, and that revision's JSON
--   KEYS[3] leader    hash    owner, expires_ms, lease_ms, parked
--   KEYS[4] budget    hash    reserved, stored, planned, estimate
--   KEYS[5] prompts   hash    added, next, done
--   KEYS[6] again     zset    how many
--   KEYS[7] leases    zset    trajectory id -> end of its lease
--   KEYS[8] ledger    hash    trajectory id -> "open:<epoch>:<writer>"
--   KEYS[9] refills   zset    how many
--   KEYS[10] versions stream  its last id
--   KEYS[11] counts   hash    the states named below
--   KEYS[12] deadlines zset   of groups whose members are listed
--   KEYS[13] clock    hash    see run_clock.lua
--   KEYS[14] times    hash    when the newest step was stepped, and the one after it planned
--   KEYS[15] ranks    hash    what the ranks of the session have, while the trainer is waited for
--   KEYS[16] events   stream  its last id
--   KEYS[17] wake     stream  its last id
-- Arguments: ARGV[1] how many leases at most    ARGV[2] of how many of these the group's deadline
-- Reply: {server time in ms;
--         stepped, planned, planned_groups, released, live_groups, open_groups, opened_groups,
--         revised_groups, session_epoch, closed, paused, at_plans of the frontier, as an array;
--         the config's JSON;
--         {owner, expires_ms: of a parked run, which needs no planner, one lease from now};
--         {reserved, stored, planned, estimate};
--         {added, next, done, how many are to be given out again};
--         how many refills nobody has taken;
--         last id of versions, or false;
--         {filtered, expired, abandoned, incomplete, dead};
--         {bytes the server uses, the most it may, 0 for any};
--         how many leases there are;
--         four per lease, those first that end first: trajectory id, end in ms, ledger entry or
--         false, ms left until the group's deadline fires or false;
--         {session_ms, opened_ms};  {when it was stepped, when the next was planned};
--         {dp_world_size, or 0 where nobody waits for a session; ranks: field, value, ...}}
-- Errors:
--   NORUN     no such run

local frontier = redis.call('HMGET', KEYS[1], 'stepped', 'planned', 'planned_groups', 'released',
  'live_groups', 'open_groups', 'opened_groups', 'revised_groups', 'session_epoch', 'closed',
  'paused', 'at_plans')
if not frontier[1] then
  return redis.error_reply('NORUN no such run')
end

local function server_memory()
  local info = redis.pcall('INFO', 'memory')
  if type(info) ~= 'string' then
    return {0, 0}
  end
  return {string.match(info, 'used_memory:(%d+)') or 0,
    string.match(info, '\nmaxmemory:(%d+)') or 0}
end

local CLOCK = KEYS[13]
-- include: turnstream.store.run/run_clock.lua

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

local function ranks()
  local session, world_size = unpack(redis.call('HMGET', KEYS[1], 'session', 'dp_world_size'))
  if (session or '') == '' or tonumber(frontier[2] or 0) <= tonumber(frontier[1]) then
    return {0, {}}
  end
  return {world_size, redis.call('HGETALL', KEYS[15])}
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function last_id(stream)
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  return last and last[1]
end

local function planner()
  local owner, expires_ms, lease_ms, parked = unpack(
    redis.call('HMGET', KEYS[3], 'owner', 'expires_ms', 'lease_ms', 'parked'))
  if parked == (last_id(KEYS[16]) or '0-0') .. ' ' .. (last_id(KEYS[17]) or '0-0') then
    expires_ms = string.format('%.0f', now_ms + lease_ms)
  end
  return {owner, expires_ms}
end

local prompts = redis.call('HMGET', KEYS[5], 'added', 'next', 'done')
prompts[4] = redis.call('ZCARD', KEYS[6])
return {
  string.format('%.0f', now_ms),
  frontier,
  redis.call('HGET', KEYS[2], redis.call('HGET', KEYS[2], 'newest')),
  planner(),
  redis.call('HMGET', KEYS[4], 'reserved', 'stored', 'planned', 'estimate'),
  prompts,
  redis.call('ZCARD', KEYS[9]),
  last_id(KEYS[10]) or false,
  redis.call('HMGET', KEYS[11], 'filtered', 'expired', 'abandoned', 'incomplete', 'dead'),
  server_memory(),
  redis.call('ZCARD', KEYS[7]),
  members(),
  redis.call('HMGET', KEYS[1], 'session_ms', 'opened_ms'),
  redis.call('HMGET', KEYS[14], 'stepped:' .. frontier[1],
    string.format('planned:%.0f', frontier[1] + 1)),
  ranks(),
}
