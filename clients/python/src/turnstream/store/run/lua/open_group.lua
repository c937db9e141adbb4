#!lua flags=allow-oom
-- Registers a group, where it is new, and opens samples of it for one writer, with a lease.
--
-- A new group to train needs capacity, by the rule of batching/fold/capacity.py: at most
-- planned_groups + (max_staleness + trained + 1 - planned) * batch_groups groups may ever have been
-- opened, not counting those that were dropped untrained; and at most max_open_groups are open at once, where the run
-- has such a bound. `trained` is the result of admitting_step: if the trainer announces versions, the
-- step of the newest one. A paused run admits none. A known group, or one to evaluate, needs no capacity.
--
-- Any new group needs bytes, for its samples at the usual size: in the run's budget, and in the server's
-- memory without a reserve. A group that a starving trainer waits for may exceed any budget, and have half of
-- the reserve. Bytes are reserved here for all samples at once, and topped up in reserve.lua. Why that
-- cannot deadlock: docs/decisions/0018-byte-budgets.md. A group that can never have its bytes, or has more
-- samples than max_samples, is refused. All arguments are checked before the first write.
--
-- Runs also when the server is full, so that it can reply WAIT: a member of a known group is some
-- hundred bytes. A group that its writer opened before, and that a restarted store has lost, needs capacity
-- only.
--
-- The group of a prompt records that the prompt is being sampled. A restarted store may have lost that:
-- prompts before it that the store has not given out yet are to be given out again. The group is refused
-- where the store knows the prompt as another group: else it would be trained twice.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    read: stepped, announced, closed, paused, planned, planned_groups;
--                             changed: live_groups, open_groups, opened_groups,
--                             opened_ms, when a group was opened to train last
--   KEYS[2] config    hash    read: newest, that revision's JSON, lease_floor
--   KEYS[3] groups    hash    group name -> "<num_samples>:<state>"; made here with state "open", or
--                             "evaluating"
--   KEYS[4] ledger    hash    trajectory id -> "open:<epoch>:<writer>"; made here
--   KEYS[5] counts    hash    changed: accepted, open
--   KEYS[6] events    stream  added, once per group: field r = the group_opened record
--   KEYS[7] wake      stream  read: its last id; added where a lease begins in a parked run
--   KEYS[8] leases    zset    trajectory id -> end of its lease; made here, renewed for its writer
--   KEYS[9] deadlines zset    added, once per group, where the run has such a deadline
--   KEYS[10] members  hash    group name -> "<num_needed>:<highest attempt>:...", where these are not
--                             num_samples and 0
--   KEYS[11] refills  zset    removed: attempts that are opened here
--   KEYS[12] over     hash    read: fingerprints of finished groups
--   KEYS[13] held     hash    trajectory id -> "r<bytes>"; made here for all samples
--   KEYS[14] budget   hash    read: stored, planned, estimate; changed: reserved
--   KEYS[15] clock    hash    read, where the run has such a deadline: see run_clock.lua
--   KEYS[16] leader   hash    read: parked, see leader_fields.py
--   KEYS[17] prompts  hash    read: added, number -> record; changed: next, the newest number that was
--                             opened as a group
--   KEYS[18] tasks    hash    group name -> number of its prompt, added
--   KEYS[19] again    zset    numbers of prompts to be given out again; removed, added
-- Arguments:
--   ARGV[1] group name    ARGV[2] "<num_samples>", or "<num_samples>/<num_needed>",
--                         then ":eval" for an evaluation, then "+" where this writer has opened it
--                         before, then "!" to refuse samples that it has open, then "#<number>" for
--                         the group of a prompt
--   ARGV[3] writer
--   ARGV[4] the group_opened record              ARGV[5...] trajectory ids
-- Reply: per trajectory id, in order: its lease epoch (integer), or why not: "CONFLICT ...", with
--        the fact group where the group takes no member any more, the state where the trajectory
--        is no longer open, and none where another writer has it.
--        Or {"WAIT"; wake id; why} where the first opening of a prompt's group is not admitted
-- Errors:
--   NORUN     no such run
--   CLOSED    a new group in a closed run
--   CONFLICT  the group was opened with another num_samples or num_needed, or for another purpose;
--             or it is finished (fact: name); or its prompt is done, or sampled as another group
--   TOOLARGE  a new group has more samples than max_samples, or too many for the length of its name,
--             or needs more bytes than the run or the server may ever have for it
--   FORMAT    fact: the format of the run, which this release does not read
--   INVALID   num_samples, num_needed or a trajectory id cannot be. Fact: attempt, where a sample has
--             an attempt above the one after its highest known attempt, or too many for its group
--   WAIT      fact: the last wake id; no capacity, no bytes, or the run is paused; try again when
--             wake has a newer entry

local LEASES, DEADLINES, MEMBERS, REFILLS, OVER = KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local HELD, BUDGET, CLOCK, CONFIG = KEYS[13], KEYS[14], KEYS[15], KEYS[2]
local PROMPTS, TASKS, AGAIN, LEDGER = KEYS[17], KEYS[18], KEYS[19], KEYS[4]
local FIRST_ESTIMATE = 65536  -- bytes of a trajectory, before any is sealed
local LEAST_ESTIMATE = 16384  -- up to here a writer need not ask for more, see store/run/budget.py
local LONGEST_GAP = 10000     -- prompts, from the newest that was given out to the next
local RESERVE = 0.2           -- of the server's memory
local RUN_FORMAT = 3          -- of runs that this release reads and writes, see records/configs.py

local stepped, closed, live, open, planned, planned_groups, paused, announced = unpack(
  redis.call('HMGET', KEYS[1], 'stepped', 'closed', 'live_groups', 'open_groups', 'planned',
    'planned_groups', 'paused', 'announced'))
if not stepped then
  return redis.error_reply('NORUN no such run')
end
local config = cjson.decode(redis.call('HGET', CONFIG, redis.call('HGET', CONFIG, 'newest')))
if config.format ~= RUN_FORMAT then
  return redis.error_reply('FORMAT [' .. string.format('%d', tonumber(config.format) or 0)
    .. '] another release wrote the run')
end

local samples, needed, purpose, again, exclusive, number =
  string.match(ARGV[2], '^(%d+)/?(%d*):?(%a*)(%+?)(!?)#?(%d*)$')
local begins = purpose == 'eval' and 'evaluating' or 'open'
needed = needed == '' and samples or needed

local ids, attempts = {}, {}

-- Why the arguments cannot be; nil where they can.
local function why_invalid()
  local num_samples, num_needed = tonumber(samples), tonumber(needed)
  if not num_samples or num_samples < 1 or num_needed < 1 or num_needed > num_samples then
    return 'size ' .. ARGV[2] .. ' of group ' .. ARGV[1] .. ' is no num_samples/num_needed'
  end
  local prefix = ARGV[1] .. '/'
  for i = 5, #ARGV do
    local sample, attempt = string.match(ARGV[i], '^(%d+)/(%d+)$', #prefix + 1)
    if string.sub(ARGV[i], 1, #prefix) ~= prefix or not sample or tonumber(sample) >= num_samples then
      return 'trajectory ' .. ARGV[i] .. ' is none of the ' .. samples .. ' samples of group '
        .. ARGV[1]
    end
    ids[#ids + 1] = ARGV[i]
    attempts[#ids] = tonumber(attempt)
  end
end

local group = redis.call('HGET', KEYS[3], ARGV[1])
if not group and samples and tonumber(samples) > config.max_samples then
  return redis.error_reply(string.format('TOOLARGE group %s: num_samples=%s is above max_samples=%.0f '
    .. 'of the run: use fewer samples, or revise max_samples', ARGV[1], samples, config.max_samples))
end
local invalid = why_invalid()
if invalid then
  return redis.error_reply('INVALID ' .. invalid)
end

-- include: slices.lua

-- include: group_limits.lua

-- include: known_attempts.lua

local num_attempts = most_attempts(ARGV[1], samples)
if not group and num_attempts == 0 then
  return redis.error_reply(string.format('TOOLARGE group %s: num_samples=%s with a name of %d bytes is '
    .. 'above the limit of %d: use fewer samples, or a name of at most %d bytes', ARGV[1], samples,
    #ARGV[1], MOST_GROUP_BYTES, MOST_GROUP_BYTES / samples))
end
local no_attempt = why_no_attempt(math.max(1, num_attempts))
if no_attempt then
  return redis.error_reply('INVALID [attempt] ' .. no_attempt)
end

-- Why no group may be opened to train now; nil where one may.
local function shortage()
  if paused then
    return 'the run is paused' .. (paused == '' and '' or ': ' .. paused)
  end
  local trained = stepped
  if announced then
    trained = math.max(announced, stepped - math.max(1, config.max_staleness))
    trained = string.format('%.0f', math.min(stepped, trained))
  end
  local most = (planned_groups or 0)
    + (config.max_staleness + trained + 1 - (planned or 0)) * config.batch_groups
  if most - live <= 0 then
    return live .. ' groups are live, ' .. most .. ' are allowed after step ' .. trained
      .. (trained == stepped and ''
        or '; step ' .. stepped .. ' is stepped, and its weights are not announced')
  end
  local most_open = config.max_open_groups or 0
  if most_open > 0 and most_open - (open or 0) <= 0 then
    return open .. ' groups are open, max_open_groups is ' .. most_open
  end
end

-- include: finished_names.lua

-- include: run_clock.lua

-- include: lease_end.lua

local function estimate()
  local usual = tonumber(redis.call('HGET', BUDGET, 'estimate') or FIRST_ESTIMATE)
  return math.max(LEAST_ESTIMATE, usual)
end

-- Bytes that the server uses, its limit (0 for none), and the bytes of an empty one; 0 if unknown.
local function server_memory()
  local info = redis.pcall('INFO', 'memory')
  if type(info) ~= 'string' then
    return 0, 0, 0
  end
  return tonumber(string.match(info, 'used_memory:(%d+)') or 0),
    tonumber(string.match(info, '\nmaxmemory:(%d+)') or 0),
    tonumber(string.match(info, '\nused_memory_startup:(%d+)') or 0)
end

-- Code and reason where a new group may not have its bytes; nil where it may.
local function byte_refusal(num_samples)
  local most, bytes = config.max_bytes or 0, num_samples * estimate()
  local used, memory, empty = server_memory()
  local needs = string.format('%.0f bytes, %.0f for each of its %.0f trajectories', bytes, estimate(),
    num_samples)
  if begins == 'evaluating' and most > 0 and bytes > most then
    return 'TOOLARGE', string.format('%s; max_bytes is %.0f: evaluate with fewer samples, or raise it',
      needs, most)
  end
  local usable = memory * (1 - (begins == 'open' and RESERVE / 2 or RESERVE)) - empty
  if memory > 0 and bytes > usable then
    return 'TOOLARGE', string.format('%s; of the %.0f bytes of the server it may have %.0f', needs,
      memory, math.floor(usable))
  end
  local starves = begins == 'open' and tonumber(planned or 0) <= tonumber(stepped)
    and live - (planned_groups or 0) < config.batch_groups
  local reserved, stored, planned = unpack(
    redis.call('HMGET', BUDGET, 'reserved', 'stored', 'planned'))
  reserved, stored, planned = tonumber(reserved or 0), tonumber(stored or 0), tonumber(planned or 0)
  local by = string.format('%.0f bytes by open trajectories, %.0f by sealed ones, %.0f by planned '
    .. 'steps; the group needs %s', reserved, stored, planned, needs)
  local held = reserved + stored + planned
  if most > 0 and held + bytes > most and not starves then
    return 'WAIT', string.format('%.0f of max_bytes=%.0f are held: %s', held, most, by)
  end
  usable = memory * (1 - (starves and RESERVE / 2 or RESERVE))
  if memory > 0 and used + reserved + bytes > usable then
    local limit = used >= memory and 'and it refuses writes'
      or string.format('of which new groups may have %.0f', usable)
    return 'WAIT', string.format('the store is full: it uses %.0f bytes, maxmemory is %.0f, %s; held are %s',
      used, memory, limit, by)
  end
end

-- Whether the store has the prompt of a new group, whether it is sampled again, and the newest prompt
-- that was opened. A store that lost a prompt opens its group as one without. Another prompt may have
-- got the number since. The record of a finished prompt is deleted.
local function read_prompt()
  if number == '' then
    return false, false, 0
  end
  local added, last, record = unpack(redis.call('HMGET', PROMPTS, 'added', 'next', number))
  local uid = string.match(record or '', '^%d+/%d+:([^:]*):')
  local is_known = tonumber(number) <= tonumber(added or 0)
    and (not uid or uid == string.match(ARGV[1], '^(.*)%%23%d+$'))
  return is_known, redis.call('ZSCORE', AGAIN, number), tonumber(last or 0)
end

local function add(words, first, second)
  words[#words + 1] = first
  words[#words + 1] = second
end

local function reserve_more(id)
  if redis.call('HEXISTS', HELD, id) == 0 then
    local bytes = string.format('%.0f', estimate())
    redis.call('HSET', HELD, id, 'r' .. bytes)
    redis.call('HINCRBY', BUDGET, 'reserved', bytes)
  end
end

-- include: whole_numbers.lua

local damage = damaged(KEYS[5]) or damaged(BUDGET)
  or damaged(KEYS[1], 'live_groups', 'open_groups', 'opened_groups')
if damage then
  return damage
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local state = begins
local members = group and redis.call('HGET', MEMBERS, ARGV[1])
if group then
  local num_samples
  num_samples, state = string.match(group, '^(%d+):(.*)$')
  if num_samples ~= samples then
    return redis.error_reply('CONFLICT group ' .. ARGV[1] .. ' was opened with ' .. num_samples
      .. ' samples, not ' .. samples)
  end
  if state ~= begins and (state == 'open' or state == 'evaluating') then
    return redis.error_reply('CONFLICT group ' .. ARGV[1] .. ' is ' .. state .. ', not ' .. begins
      .. ': a group is for training or for evaluation')
  end
  local num_needed = string.match(members or samples, '^%d+')
  if num_needed ~= needed and state == 'open' then
    return redis.error_reply('CONFLICT group ' .. ARGV[1] .. ' was opened to need ' .. num_needed
      .. ' of its samples, not ' .. needed)
  end
else
  if is_finished_name(ARGV[1]) then
    return redis.error_reply('CONFLICT [name] group ' .. ARGV[1] .. ' is finished: a name is used once')
  end
  local is_known, is_repeated, last_prompt = read_prompt()
  if is_known and not is_repeated and tonumber(number) <= last_prompt then
    return redis.error_reply('CONFLICT group ' .. ARGV[1] .. ' is of a prompt that the store continues '
      .. 'as an earlier group, or has trained as one')
  end
  if is_known and not is_repeated and number - last_prompt > LONGEST_GAP then
    return redis.error_reply(string.format('INVALID prompt %s of group %s is above %.0f: %.0f is the newest '
      .. 'that was given out, and at most %.0f are passed over', number, ARGV[1], last_prompt + LONGEST_GAP,
      last_prompt, LONGEST_GAP - 1))
  end
  if closed ~= '0' then
    return redis.error_reply('CLOSED the run takes no new group')
  end
  local code, why
  if again == '' then
    code, why = byte_refusal(samples)
  end
  if code == 'TOOLARGE' then
    return redis.error_reply('TOOLARGE group ' .. ARGV[1] .. ' needs ' .. why)
  end
  why = begins == 'open' and shortage() or why
  if why then
    local last = redis.call('XREVRANGE', KEYS[7], '+', '-', 'COUNT', 1)[1]
    local wake_id = last and last[1] or '0-0'
    if number ~= '' and again == '' then
      return {'WAIT', wake_id, why}
    end
    return redis.error_reply('WAIT [' .. wake_id .. '] ' .. why)
  end
  local bytes = estimate()
  local reserved, reservation = {}, string.format('r%.0f', bytes)
  for sample = 0, samples - 1 do
    add(reserved, ARGV[1] .. '/' .. sample .. '/0', reservation)
  end
  write_sliced('HSET', HELD, reserved)
  redis.call('HINCRBY', BUDGET, 'reserved', string.format('%.0f', samples * bytes))
  redis.call('HSET', KEYS[3], ARGV[1], samples .. ':' .. begins)
  if needed ~= samples then
    members = needed .. ':0:0:'
    redis.call('HSET', MEMBERS, ARGV[1], members)
  end
  local deadline_s = config.group_deadline_s or 0
  if deadline_s > 0 then
    redis.call('ZADD', DEADLINES, string.format('%.0f', run_ms() + deadline_s * 1000),
      'group:' .. ARGV[1])
  end
  if begins == 'open' then
    redis.call('HINCRBY', KEYS[1], 'live_groups', 1)
    redis.call('HINCRBY', KEYS[1], 'open_groups', 1)
    redis.call('HINCRBY', KEYS[1], 'opened_groups', 1)
    redis.call('HSET', KEYS[1], 'opened_ms', string.format('%.0f', now_ms))
  end
  redis.call('XADD', KEYS[6], '*', 'r', ARGV[4])
  if is_known then
    if is_repeated then
      redis.call('ZREM', AGAIN, number)
    else
      local passed = {}
      for earlier = last_prompt + 1, number - 1 do
        add(passed, earlier, string.format('%.0f', earlier))
      end
      write_sliced('ZADD', AGAIN, passed)
      redis.call('HSET', PROMPTS, 'next', number)
    end
    redis.call('HSET', TASKS, ARGV[1], number)
  end
end

local entries = group and read_sliced('HMGET', LEDGER, ids) or {}
local lease_ms = math.floor(config.lease_s * 1000)
local ends_ms = string.format('%.0f', lease_end(now_ms, lease_ms))
local replies, opened, leases = {}, {}, {}
local of_writer = 'open:1:' .. ARGV[3]
local highest = 0
for i, id in ipairs(ids) do
  local entry = entries[i]
  if entry then
    local epoch, writer = string.match(entry, '^open:(%d+):(.*)$')
    if writer == ARGV[3] and exclusive == '' then
      replies[i] = tonumber(epoch)
      add(leases, ends_ms, id)
    elseif writer then
      replies[i] = 'CONFLICT ' .. id .. ' is being written by ' .. writer
    else
      local ended = string.match(entry, '^[^:]*')
      replies[i] = 'CONFLICT [' .. ended .. '] ' .. id .. ' is already ' .. ended
    end
  elseif state ~= begins then
    replies[i] = 'CONFLICT [group] group ' .. ARGV[1] .. ' is already ' .. state
  else
    replies[i] = 1
    add(opened, id, of_writer)
    add(leases, ends_ms, id)
    local attempt = attempts[i]
    if group or attempt > 0 then  -- the first attempts of a new group hold theirs already
      reserve_more(id)
    end
    if attempt > 0 then
      highest = math.max(highest, attempt)
      redis.call('ZREM', REFILLS, id)
    end
  end
end
if highest > 0 then
  local before, rest = string.match(members or needed .. ':0:0:', '^%d+:(%d+)(:.*)$')
  if highest > tonumber(before) then
    redis.call('HSET', MEMBERS, ARGV[1], needed .. ':' .. highest .. rest)
  end
end
if #leases > 0 then
  write_sliced('ZADD', LEASES, leases)
  if group and redis.call('HEXISTS', KEYS[16], 'parked') == 1 then
    redis.call('XADD', KEYS[7], 'MAXLEN', 1, '*', 'w', '')  -- no event says so
  end
end
if #opened > 0 then
  write_sliced('HSET', LEDGER, opened)
  redis.call('HINCRBY', KEYS[5], 'accepted', #opened / 2)
  redis.call('HINCRBY', KEYS[5], 'open', #opened / 2)
end
return replies
