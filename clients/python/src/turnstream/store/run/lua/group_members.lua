#!lua
-- Included by open_group: which samples of a group may be opened, and how.
--
-- A script that decides a group reads and ends every attempt of it. So samples, attempts and the bytes of the
-- name are limited together: see most_samples in groups.py. Attempt 0 of every sample is known with its group,
-- and a further one by its ledger entry or a granted refill. A known one may be opened, and the next one up to
-- the limit. A writer that has opened its attempt before may repeat that: the store may have lost the attempts
-- before it.

local MOST_GROUP_BYTES = 524288
local LEAST_NAME_BYTES = 128
local ATTEMPT_LIMIT = 1000

local ids, attempts = {}, {}

-- The number of attempts that a sample may have without a granted refill; 0 if the group cannot be opened.
local function most_attempts()
  local bytes = samples * math.max(LEAST_NAME_BYTES, #NAME)
  return math.min(ATTEMPT_LIMIT, math.floor(MOST_GROUP_BYTES / bytes))
end

-- Why the arguments cannot be; nil where they can. Fills `ids` and `attempts`.
local function why_invalid()
  local num_samples, num_needed = tonumber(samples), tonumber(needed)
  if not num_samples or num_samples < 1 or num_needed < 1 or num_needed > num_samples then
    return 'size ' .. ARGV[2] .. ' of group ' .. NAME .. ' is no num_samples/num_needed'
  end
  local prefix = NAME .. '/'
  for i = 5, #ARGV do
    local sample, attempt = string.match(ARGV[i], '^(%d+)/(%d+)$', #prefix + 1)
    if string.sub(ARGV[i], 1, #prefix) ~= prefix or not sample or tonumber(sample) >= num_samples then
      return 'trajectory ' .. ARGV[i] .. ' is none of the ' .. samples .. ' samples of group ' .. NAME
    end
    ids[#ids + 1], attempts[#ids + 1] = ARGV[i], tonumber(attempt)
  end
end

local function is_known(id)
  return redis.call('HEXISTS', LEDGER, id) == 1 or redis.call('ZSCORE', REFILLS, id)
end

local function why_no_attempt(most)
  local named = {}
  for i, id in ipairs(ids) do
    local attempt = attempts[i]
    named[id] = attempt > 0
    if attempt >= most and not is_known(id) then
      return string.format('%.0f of trajectory %s is above %.0f, the highest of this group: %s samples '
        .. 'and a name of %d bytes', attempt, id, most - 1, samples, #NAME)
    end
    local prefix = attempt > 1 and string.match(id, '^.*/')
    local before = prefix and string.format('%s%.0f', prefix, attempt - 1)
    if before and again == '' and not (named[before] or is_known(before) or is_known(id)) then
      local highest = attempt - 2
      while highest > 0 and not is_known(string.format('%s%.0f', prefix, highest)) do
        highest = highest - 1
      end
      return string.format('%.0f of trajectory %s is above %.0f, the one after the highest known attempt '
        .. 'of the sample', attempt, id, highest + 1)
    end
  end
end

-- nil where its writer gets it again.
local function refusal_of(id, entry)
  local writer = string.match(entry, '^open:%d+:(.*)$')
  if writer == WRITER and exclusive == '' then
    return nil
  elseif writer then
    return 'CONFLICT ' .. id .. ' is being written by ' .. writer
  end
  local ended = string.match(entry, '^[^:]*')
  return 'CONFLICT [' .. ended .. '] ' .. id .. ' is already ' .. ended
end

-- Reserves the bytes of opened samples that hold none; those of a new group hold theirs already.
local function reserve_more(opened, bytes)
  local reserved = {}
  for i, held in ipairs(read_sliced('HMGET', HELD, opened)) do
    if not held then
      add(reserved, opened[i], string.format('r%.0f', bytes))
    end
  end
  if #reserved > 0 then
    write_sliced('HSET', HELD, reserved)
    redis.call('HINCRBY', BUDGET, 'reserved', string.format('%.0f', #reserved / 2 * bytes))
  end
end

local function raise_highest(highest, members)
  local before, rest = string.match(members or needed .. ':0:0:', '^%d+:(%d+)(:.*)$')
  if highest > tonumber(before) then
    redis.call('HSET', MEMBERS, NAME, needed .. ':' .. highest .. rest)
  end
end

-- Opens the samples, and returns the reply. `bytes` are reserved for each that holds none.
local function open_members(state, members, bytes, ends_ms)
  local entries, replies = read_sliced('HMGET', LEDGER, ids), {}
  local opened, words, leases, highest = {}, {}, {}, 0
  for i, id in ipairs(ids) do
    if entries[i] then
      replies[i] = refusal_of(id, entries[i]) or tonumber(string.match(entries[i], '^open:(%d+):'))
    elseif state ~= begins then
      replies[i] = 'CONFLICT [group] group ' .. NAME .. ' is already ' .. state
    else
      replies[i] = 1
      opened[#opened + 1] = id
      add(words, id, 'open:1:' .. WRITER)
      if attempts[i] > 0 then
        highest = math.max(highest, attempts[i])
        redis.call('ZREM', REFILLS, id)
      end
    end
    if type(replies[i]) == 'number' then
      add(leases, ends_ms, id)
    end
  end
  write_sliced('ZADD', LEASES, leases)
  if #opened > 0 then
    if group or highest > 0 then
      reserve_more(opened, bytes)
    end
    raise_highest(highest, members)
    write_sliced('HSET', LEDGER, words)
    redis.call('HINCRBY', COUNTS, 'accepted', #opened)
    redis.call('HINCRBY', COUNTS, 'open', #opened)
  end
  return replies, #leases > 0
end
