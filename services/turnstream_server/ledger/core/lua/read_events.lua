#!lua flags=no-writes
-- Reads the next entries of a run's events, limited by number and bytes.
--
-- Arguments: ARGV[1] id of the entry before the first    ARGV[2] entries, at most
--            ARGV[3] bytes of all fields, at most; the first entry is always returned
--            ARGV[4] bytes of one entry, at most; a longer entry is returned without field r
-- Reply:     per entry: {its id, field r, field t, bytes of all its fields}; nil for a missing field

local EVENTS = KEYS[1]
local ID_BYTES = 600  -- more than any id of a trajectory has
local CHUNK = 16  -- entries that are copied before their bytes are counted

local most, most_bytes, most_each = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local reply = {}
local num_bytes = 0
local after = '(' .. ARGV[1]
local count = 1  -- doubled, so that one long entry is not read together with hundreds

while true do
  local entries = redis.call('XRANGE', EVENTS, after, '+', 'COUNT', math.min(count, most - #reply))
  for _, entry in ipairs(entries) do
    local record, posted_for, size = false, false, 0
    for i = 1, #entry[2], 2 do
      local name, value = entry[2][i], entry[2][i + 1]
      size = size + #name + #value
      if name == 'r' then
        record = value
      elseif name == 't' then
        posted_for = string.sub(value, 1, ID_BYTES)
      end
    end
    if size > most_each then
      record = false
    end
    num_bytes = num_bytes + size
    if #reply > 0 and num_bytes > most_bytes then
      return reply
    end
    reply[#reply + 1] = {entry[1], record, posted_for, size}
  end
  if #entries < math.min(count, most) or #reply >= most or num_bytes >= most_bytes then
    return reply
  end
  after = '(' .. entries[#entries][1]
  count = math.min(count * 2, CHUNK)
end
