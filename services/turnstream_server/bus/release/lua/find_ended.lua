#!lua flags=no-writes
-- Scans a part of the ledger for trajectories that ended untrained.
--
-- Arguments: ARGV[1] cursor, "0" at first    ARGV[2] about how many entries to scan
-- Reply:     {next cursor, "0" at the end; trajectory id; its entry; ...}

local LEDGER = KEYS[1]

local ENDS = {filtered = true, expired = true, surplus = true, incomplete = true, evaluated = true,
  abandoned = true}

-- A dead trajectory counts once it is discarded. ended_writes.py has the same rule.
local function has_ended(entry)
  return ENDS[string.match(entry, '^[^:]*')] or string.sub(entry, 1, 14) == 'dead:discarded'
end

local page = redis.call('HSCAN', LEDGER, ARGV[1], 'COUNT', ARGV[2])
local reply = {page[1]}
local entries = page[2]
for i = 1, #entries, 2 do
  if has_ended(entries[i + 1]) then
    reply[#reply + 1] = entries[i]
    reply[#reply + 1] = entries[i + 1]
  end
end
return reply
