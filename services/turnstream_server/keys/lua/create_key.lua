#!lua
-- Store an API key, unless another key has its name, or the same key has another record.
-- Damaged records have no name.
-- KEYS  keys
-- ARGV  id of the key, record, name, the name as a record has it
-- Reply {created} or {taken}
local stored = redis.call('HGETALL', KEYS[1])
local function name_of(record)
  local is_json, key = pcall(cjson.decode, record)
  return is_json and type(key) == 'table' and key.name
end
for field = 1, #stored, 2 do
  local id, record = stored[field], stored[field + 1]
  local is_same = id == ARGV[1] and record == ARGV[2]
  local has_name = string.find(record, ARGV[4], 1, true) and name_of(record) == ARGV[3]
  if not is_same and (id == ARGV[1] or has_name) then
    return {'taken'}
  end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return {'created'}
