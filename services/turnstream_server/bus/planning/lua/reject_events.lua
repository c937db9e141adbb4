#!lua flags=allow-oom
-- Rejects events of a run, each once: no leader folds them from now on. If the event is of a sealed
-- trajectory, that becomes a dead letter. Else the beginning of the event is kept in `damaged`.
--
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] bytes of a record that are kept, at most
--   ARGV[3] events that are kept, at most
--   ARGV[4...] four per event: its id; why; id of its trajectory, or ""; the trajectory_died
--              record
-- Reply:  number of events that this call rejected

local LEADER, LEDGER, COUNTS, EVENTS, LETTERS, DEADLINES, HELD, DAMAGED, REJECTED = unpack(KEYS)
local PER_EVENT = 4

-- include: turnstream_server.bus.leadership/fenced.lua
-- include: set_dead.lua

-- Return the record of an event, or all fields of an entry that has no record.
local function record_of(event_id)
  local entry = redis.call('XRANGE', EVENTS, event_id, event_id)[1]
  local fields = entry and entry[2] or {}
  for i = 1, #fields, 2 do
    if fields[i] == 'r' then
      return fields[i + 1]
    end
  end
  return table.concat(fields, '\n')
end

local function keep(event_id, why)
  local record, most = record_of(event_id), tonumber(ARGV[2])
  if #record > most then
    why = string.format('%s (the first %d of %d bytes are kept)', why, most, #record)
    record = string.sub(record, 1, most)
  end
  -- Refused where an older release has kept it already, without the decision.
  redis.pcall('XADD', DAMAGED, 'MAXLEN', ARGV[3], event_id, 'r', record, 'why', why)
end

local COUNTERS = {{COUNTS}}
-- include: turnstream_server.bus.leadership/whole_counters.lua

local num_new = 0
for i = 4, #ARGV, PER_EVENT do
  local event_id, why, id, died = unpack(ARGV, i, i + PER_EVENT - 1)
  if not redis.call('ZSCORE', REJECTED, event_id) then
    num_new = num_new + 1
    redis.call('ZADD', REJECTED, string.match(event_id, '^%d+'), event_id)
    local entry = id ~= '' and redis.call('HGET', LEDGER, id) or ''
    local state = string.match(entry or '', '^[^:]*')
    if state == 'sealed' or state == 'awaiting_reward' then
      set_dead(id, state, why, died)
    elseif state ~= 'dead' then
      keep(event_id, why)
    end
  end
end
return num_new
