#!lua flags=allow-oom
-- Rejects events of a run, each once: no leader folds them from now on.
--
-- An event of a sealed trajectory ends that trajectory, which becomes a dead letter. Any other is
-- kept in `damaged`, and the oldest there make room.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader     hash    read: epoch
--   KEYS[2] ledger     hash    trajectory id: "sealed:<epoch>" or "awaiting_reward:<epoch>" becomes
--                              "dead:<reason>"
--   KEYS[3] counts     hash    changed: sealed or awaiting_reward, dead, dead_bytes, discarded_events
--   KEYS[4] events     stream  read; added, once per trajectory: field r = the trajectory_died record
--   KEYS[5] letters    hash    added: trajectory id -> "<since, server ms>:<bytes>"
--   KEYS[6] deadlines  zset    removed: "reward:<trajectory id>"
--   KEYS[7] damaged    stream  added, under the event's own id: fields r = the beginning of the
--                              record, why = the reason; the oldest are removed. It takes no id that
--                              is not above all before
--   KEYS[8] rejected   zset    added: ids of the events, each with its milliseconds
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] bytes of a record that are kept, at most
--   ARGV[3] events that are kept, at most
--   ARGV[4...] five per event: its id; why; id of its trajectory, or ""; the trajectory_died record;
--              bytes of the payload of the trajectory
-- Reply:  how many were rejected now, an integer
-- Errors: FENCED  another planner leads

local LEDGER, COUNTS, EVENTS, LETTERS, DEADLINES = KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local DAMAGED, REJECTED = KEYS[7], KEYS[8]
local PER_EVENT = 5

-- include: set_dead.lua

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local most_bytes, most_events = tonumber(ARGV[2]), tonumber(ARGV[3])

-- The record of an event; all fields of an entry that has no record.
local function record_of(event_id)
  local entry = redis.call('XRANGE', EVENTS, event_id, event_id)[1]
  local record
  for i = 1, entry and #entry[2] or 0, 2 do
    if entry[2][i] == 'r' then
      record = entry[2][i + 1]
    end
  end
  return record or table.concat(entry and entry[2] or {}, '\n')
end

local function make_room()
  while redis.call('XLEN', DAMAGED) > most_events do
    local oldest = redis.call('XRANGE', DAMAGED, '-', '+', 'COUNT', 1)[1]
    redis.call('XDEL', DAMAGED, oldest[1])
    redis.call('HINCRBY', COUNTS, 'discarded_events', 1)
    redis.call('HINCRBY', COUNTS, 'dead_bytes', -#oldest[2][2])
  end
end

local function keep(event_id, why)
  local record = record_of(event_id)
  if #record > most_bytes then
    why = string.format('%s (the first %d of %d bytes are kept)', why, most_bytes, #record)
    record = string.sub(record, 1, most_bytes)
  end
  local added = redis.pcall('XADD', DAMAGED, event_id, 'r', record, 'why', why)
  if type(added) == 'table' and added.err then
    return  -- the release before kept it, without the decision
  end
  redis.call('HINCRBY', COUNTS, 'dead_bytes', #record)
  make_room()
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(COUNTS)
if damage then
  return damage
end
local num_new = 0
for i = 4, #ARGV, PER_EVENT do
  local event_id, why, id, died, bytes = unpack(ARGV, i, i + PER_EVENT - 1)
  if not redis.call('ZSCORE', REJECTED, event_id) then
    num_new = num_new + 1
    redis.call('ZADD', REJECTED, string.match(event_id, '^%d+'), event_id)
    local entry = id ~= '' and redis.call('HGET', LEDGER, id) or ''
    local state = string.match(entry or '', '^[^:]*')
    if state == 'sealed' or state == 'awaiting_reward' then
      set_dead(id, state, why, died, bytes)
    elseif state ~= 'dead' then
      keep(event_id, why)
    end
  end
end
return num_new
