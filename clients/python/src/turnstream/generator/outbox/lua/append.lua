#!lua
-- Stores turns of a trajectory, and its seal if it is among the records, all or nothing. Records
-- that are stored already, by their CRC (the last four bytes), are skipped. The first call of a
-- writer creates the keys; every other call finds its own epoch there, or is refused.
--
-- A trajectory is adopted in two slots: first in the ledger (adopt.lua), then here, by a first call with
-- the higher epoch, which may carry no record: docs/decisions/0009-leases.md. So the epochs of its entries
-- only grow, and no two writers alternate. The first writer also adds turns without this script. So a
-- call of a later epoch, and a seal, raise the last id of the stream: docs/decisions/0032-later-turns.md
--
-- Arguments:
--   ARGV[1] "<lease epoch>:<writer>" in the first call, later "<lease epoch>/<writer>", or the epoch
--           alone. A store that lost an adoption may return its epoch to another writer: if two have
--           the same epoch, the one whose first call came first is right
--   ARGV[2] "<index of the first turn>", or "<index>/<bytes of the turns before it>"
--   ARGV[3] "1" if the last record is the seal, else "0"    ARGV[4...] records; there may be none
-- Reply: the number of records that were stored by this call
-- Facts of errors: FENCED [released], unless the trajectory was abandoned. GAP [the missing turn]

local TURNS, META = unpack(KEYS)
local MOST_BYTES = 48 * 1024 * 1024  -- of all turns: a reader takes them in one reply

local epoch, kind, caller = string.match(ARGV[1], '^(%d+)([:/]?)(.*)$')
local holder, writer, sealed, bytes, released = unpack(
  redis.call('HMGET', META, 'epoch', 'writer', 'sealed', 'bytes', 'released'))
if released == 'abandoned' then
  return redis.error_reply('FENCED the trajectory was abandoned, and its payload released')
elseif released then
  return redis.error_reply('FENCED [released] the trajectory is finished'
    .. (released == 'deleted' and ': its run was deleted' or ', and its payload released'))
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
  return redis.error_reply('FENCED epoch ' .. epoch .. ' is that of ' .. writer .. ', not of ' .. caller)
end

local num_entries = redis.call('XLEN', TURNS)
local turns = sealed == '1' and math.max(num_entries - 1, 0) or num_entries
local first, bytes_before = string.match(ARGV[2], '^(%d+)/?(%d*)$')
first, bytes_before = tonumber(first), tonumber(bytes_before) or 0
local seals = ARGV[3] == '1'
local num_turns = #ARGV - 3 - (seals and 1 or 0)
local last = first + num_turns
if first > turns then
  return redis.error_reply('GAP [' .. turns .. '] expected ' .. turns)
end

local function is_stored(entry, record)
  local found = redis.call('XRANGE', TURNS, '0-' .. entry, '0-' .. entry)[1]
  return found ~= nil and string.sub(found[2][2], -4) == string.sub(record, -4)
end

-- 1. Compare what is there already, before anything is written.
local num_known = math.min(turns - first, num_turns)
for i = 1, num_known do
  if not is_stored(first + i, ARGV[3 + i]) then
    return redis.error_reply('CONFLICT turn ' .. first + i - 1 .. ' has another content')
  end
  bytes_before = bytes_before + #ARGV[3 + i]
end
bytes = math.max(tonumber(bytes or 0), bytes_before)
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
local num_new = sealed == '1' and 0 or num_turns - num_known + (seals and 1 or 0)
for i = #ARGV - num_new + 1, #ARGV do
  bytes = bytes + #ARGV[i]
end
local num_bytes = bytes - (seals and #ARGV[#ARGV] or 0)
if num_bytes > MOST_BYTES then
  return redis.error_reply(string.format('TOOLARGE turn %.0f: the trajectory would have %.0f bytes, more '
    .. 'than %.0f: use smaller columns, or end it before this turn', last - 1, num_bytes, MOST_BYTES))
end
if num_new > 0 and turns > 0 and epoch ~= '1' then
  redis.call('XSETID', TURNS, '0-' .. turns)
end
for i = #ARGV - num_new + 1, #ARGV do
  redis.call('XADD', TURNS, '0-' .. (first + i - 3), 'r', ARGV[i])
end
if num_new > 0 or holder ~= epoch then
  redis.call('HSET', META, 'epoch', epoch, 'writer', is_first_call and caller or writer,
    'turns', math.max(turns, last), 'bytes', string.format('%.0f', bytes),
    'sealed', (seals or sealed == '1') and 1 or 0)
  if num_entries > 0 and (epoch ~= '1' or seals) then
    redis.call('XSETID', TURNS, '0-18446744073709551615')  -- nothing follows without this script
  end
end
return num_new
