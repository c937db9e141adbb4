#!lua flags=allow-oom
-- Writes what a leader or a trainer session has decided, all or nothing, if the store still holds the
-- facts of the decision. Runs also when the server is full: only plans and endings lead to releases.
--
-- Arguments:
--   ARGV[1] leader epoch, "" for a caller that need not lead
--   ARGV[2...] calls, each: its name, the number of its key in KEYS, the number of its words, words.
--              First the facts that must hold:
--                FIELDS  field, "=" and its value, or "" where it is missing; ...
--                PREFIX  the beginning of each value, field, ...
--                LEAST   the lowest value of each field, field, ...
--                SIZE    HLEN or ZCARD, and the number of the fields or members of the key
--                SCORE   member of a sorted set, its score
--                NEWEST  id of the newest entry of a stream, "0-0" where it is empty
--              Then commands of the server, and
--                ENTRY   a field, which gets the id of the entry that the XADD before it has added
--                EXTEND  field, bytes that are added to the end of its value; ...
--                CUT     id: removes the entries of a stream from this one on. The next entry may
--                        have a lower id than they had
-- Reply:     {time in ms, the reply of each command}. If a fact does not hold, nothing was written, and
--            the reply is {0, key, field, its value or false} for the first such fact
-- Errors:    FENCED  another planner leads the run

local LEADER = KEYS[1]

if ARGV[1] ~= '' and redis.call('HGET', LEADER, 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
-- include: turnstream.store.run/server_time.lua
-- include: turnstream.store.run/slices.lua
-- include: turnstream.store.run/whole_numbers.lua

local function words(first, last)
  local some = {}
  for i = first, last do
    some[#some + 1] = ARGV[i]
  end
  return some
end

-- The fields of a call of pairs, and their values in the store.
local function stored(key, first, last)
  local fields = {}
  for i = first, last, 2 do
    fields[#fields + 1] = ARGV[i]
  end
  return fields, read_sliced('HMGET', key, fields)
end

local function extend(key, first, last)
  local changes = {}
  local fields, values = stored(key, first, last)
  for i, found in ipairs(values) do
    add(changes, fields[i], (found or '') .. ARGV[first + 2 * i - 1])
  end
  write_sliced('HSET', key, changes)
end

-- A stream keeps the id of its last entry when that is deleted. So it is written again.
local function cut(key, first_removed)
  local kept = redis.call('XRANGE', key, '-', '(' .. first_removed)
  redis.call('DEL', key)
  for _, entry in ipairs(kept) do
    redis.call('XADD', key, entry[1], unpack(entry[2]))
  end
end

local FACTS = {}

function FACTS.FIELDS(key, first, last)
  local fields, values = stored(key, first, last)
  for i, found in ipairs(values) do
    if (found and '=' .. found or '') ~= ARGV[first + 2 * i - 1] then
      return {0, key, fields[i], found}
    end
  end
end

local function each_value(key, first, last, holds)
  local fields = words(first + 1, last)
  for i, found in ipairs(read_sliced('HMGET', key, fields)) do
    if not holds(found or '') then
      return {0, key, fields[i], found}
    end
  end
end

function FACTS.PREFIX(key, first, last)
  local prefix = ARGV[first]
  return each_value(key, first, last, function(found)
    return string.sub(found, 1, #prefix) == prefix
  end)
end

function FACTS.LEAST(key, first, last)
  return each_value(key, first, last, function(found)
    return (tonumber(found) or -1) >= tonumber(ARGV[first])
  end)
end

function FACTS.SIZE(key, first, last)
  local size = redis.call(ARGV[first], key)
  if size ~= tonumber(ARGV[last]) then
    return {0, key, 'size', tostring(size)}
  end
end

function FACTS.SCORE(key, first, last)
  local score = redis.call('ZSCORE', key, ARGV[first])
  if tonumber(score or 'nan') ~= tonumber(ARGV[last]) then
    return {0, key, ARGV[first], score}
  end
end

function FACTS.NEWEST(key, first)
  local newest = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  if (newest and newest[1] or '0-0') ~= ARGV[first] then
    return {0, key, 'newest', newest and newest[1] or false}
  end
end

-- Calls take(name, key, first word, last word) for each call, until it returns a reply.
local function each_call(take)
  local at = 2
  while at <= #ARGV do
    local first = at + 3
    local last = first + ARGV[at + 2] - 1
    local reply = take(ARGV[at], KEYS[tonumber(ARGV[at + 1])], first, last)
    if reply then
      return reply
    end
    at = last + 1
  end
end

local refusal = each_call(function(name, key, first, last)
  if name == 'HINCRBY' then
    return damaged(key, ARGV[first])
  end
  return FACTS[name] and FACTS[name](key, first, last)
end)
if refusal then
  return refusal
end
local replies = {server_ms()}
each_call(function(name, key, first, last)
  if name == 'ENTRY' then
    redis.call('HSET', key, ARGV[first], replies[#replies])
  elseif name == 'EXTEND' then
    extend(key, first, last)
  elseif name == 'CUT' then
    cut(key, ARGV[first])
  elseif not FACTS[name] then
    local some = words(first, last)
    replies[#replies + 1] = redis.call(name, key, unpack(some))
  end
end)
return replies
