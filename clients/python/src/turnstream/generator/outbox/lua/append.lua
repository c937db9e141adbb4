#!lua
-- Stores turns of a trajectory, and its seal where that comes along, all or nothing. A record that
-- is there already, by its CRC (its last four bytes), is passed over.
--
-- The place of the payload is made by a writer's first call alone, which says so by naming the
-- writer. Any other call finds its own epoch there, or is late and refused.
--
-- A trajectory is taken over in two slots, one after the other: first in the ledger (take_over.lua),
-- then here, by a first call with the higher epoch, which may carry no record. Only after it does
-- the new writer (B) read what the old one (A) has stored, so that nothing is added behind its back:
--
--   A's turn before B's first call   stored; B finds it among the turns and continues after it
--   A's turn after it                FENCED; so is A's own first call, if that comes late
--   A's seal before B's first call   stored; A's event is refused by the ledger, which B has. B finds
--                                    the seal and posts it with its own epoch: the first seal wins
--   A's event before B's take-over   the trajectory is sealed, and take_over refuses
--   B dies before its first call     A may go on storing turns, and even a seal, for nothing: its
--                                    event does not fit the ledger. Whoever comes next finds them
--   B sleeps before its first call,  B's call is FENCED where C's came first; else C's first call
--   and C takes over                 fences B, and C finds the turns of both, in order
--   given up instead of taken over   the planner makes a first call with an epoch above all writers'
--
-- So the epochs of a trajectory's entries only ever grow, and no two writers alternate.
--
-- Keys, in the trajectory's slot:
--   KEYS[1] turns  stream  added: turn n (from 0) as entry "0-<n + 1>", the seal as the entry after
--                          the last turn; field r = record
--   KEYS[2] meta   hash    epoch, writer: made here, or taken over by a newer epoch;
--                          turns, bytes, sealed (0 or 1): changed here; read: released
-- Arguments:
--   ARGV[1] "<lease epoch>:<writer>" in the first call, later "<lease epoch>/<writer>", or the epoch
--           alone. A store that lost a take-over may give its epoch to another writer: of two that
--           have the same epoch, the one whose first call came first is right
--   ARGV[2] index of the first turn, from 0
--   ARGV[3] "1" if the last record is the seal, else "0"
--   ARGV[4...] records; there may be none
-- Reply: how many of the records were stored now, an integer; the others were there already
-- Errors:
--   FENCED    the place was never made, another epoch or writer has it, or the payload was released
--             (fact: released, unless the trajectory was abandoned)
--   CONFLICT  another writer has it with the same epoch; a turn or the seal is there with another
--             content; or the trajectory is sealed and this goes on
--   GAP       fact: k; turn k is missing

local epoch, kind, caller = string.match(ARGV[1], '^(%d+)([:/]?)(.*)$')
local holder, writer, turns, sealed, bytes, released = unpack(
  redis.call('HMGET', KEYS[2], 'epoch', 'writer', 'turns', 'sealed', 'bytes', 'released'))
if released == 'given up' then
  return redis.error_reply('FENCED the trajectory was given up, and its payload released')
end
if released == 'deleted' then
  return redis.error_reply('FENCED [released] the trajectory is finished: its run was deleted')
end
if released then
  return redis.error_reply('FENCED [released] the trajectory is finished, and its payload released')
end
local is_first_call = kind == ':'
if not holder and not is_first_call then
  return redis.error_reply('FENCED the trajectory was never opened, or is released')
end
if holder and holder ~= epoch and not (is_first_call and tonumber(holder) < tonumber(epoch)) then
  return redis.error_reply('FENCED epoch ' .. holder .. ' writes, not ' .. epoch)
end
if holder == epoch and is_first_call and writer ~= caller then
  return redis.error_reply('CONFLICT the trajectory is being written by ' .. writer)
end
if kind == '/' and writer ~= caller then
  return redis.error_reply('FENCED epoch ' .. epoch .. ' is that of ' .. writer .. ', not of '
    .. caller)
end

turns = tonumber(turns or 0)
bytes = tonumber(bytes or 0)
local first = tonumber(ARGV[2])
local seals = ARGV[3] == '1'
local num_turns = #ARGV - 3 - (seals and 1 or 0)
local last = first + num_turns
if first > turns then
  return redis.error_reply('GAP [' .. turns .. '] expected ' .. turns)
end

local function is_stored(entry, record)
  local id = '0-' .. entry
  local found = redis.call('XRANGE', KEYS[1], id, id)[1]
  return found ~= nil and string.sub(found[2][2], -4) == string.sub(record, -4)
end

-- 1. Compare what is there already, before anything is written.
local num_known = math.min(turns - first, num_turns)
for i = 1, num_known do
  if not is_stored(first + i, ARGV[3 + i]) then
    return redis.error_reply('CONFLICT turn ' .. first + i - 1 .. ' has another content')
  end
end
if seals and last < turns then
  return redis.error_reply('CONFLICT turn ' .. last .. ' is stored, not the seal')
end
if sealed == '1' then
  if last > turns then
    return redis.error_reply('CONFLICT the trajectory is sealed after ' .. turns .. ' turns')
  end
  if seals and not is_stored(turns + 1, ARGV[#ARGV]) then
    return redis.error_reply('CONFLICT the trajectory is sealed with another content')
  end
end

-- 2. Write what is new.
local num_new = 0
if sealed ~= '1' then
  num_new = num_turns - num_known + (seals and 1 or 0)
end
for i = #ARGV - num_new + 1, #ARGV do
  redis.call('XADD', KEYS[1], '0-' .. (first + i - 3), 'r', ARGV[i])
  bytes = bytes + #ARGV[i]
end
if num_new > 0 or holder ~= epoch then
  redis.call('HSET', KEYS[2], 'epoch', epoch, 'writer', is_first_call and caller or writer,
    'turns', math.max(turns, last), 'bytes', string.format('%.0f', bytes),
    'sealed', (seals or sealed == '1') and 1 or 0)
end
return num_new
