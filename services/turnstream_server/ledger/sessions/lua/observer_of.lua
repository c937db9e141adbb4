#!lua
-- Included: an observer belongs to the owner of the key that declared it.

-- Return the fields of a stored observer as text: step seen, expiry, length, `:<first missed>`, `@<owner>`.
local function fields_of(entry)
  return string.match(entry or '', '^(%d+):(%d+):(%d+)(:?%d*)(@?.*)$')
end

local function refused_to(caller, is_admin, owner)
  if owner and owner ~= '' and owner ~= '@' .. caller and is_admin ~= '1' then
    return redis.error_reply('CONFLICT observer ' .. ARGV[1] .. ' belongs to another API key: use '
      .. 'another name')
  end
end
