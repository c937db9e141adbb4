#!lua
-- Included by scripts that add to counters: refuses a damaged counter before the first write.
-- COUNTERS is a list of {key}, for all fields of a hash, or {key, field, ...}.

-- include: turnstream.store.run/whole_numbers.lua

for _, counter in ipairs(COUNTERS) do
  local damage = damaged(unpack(counter))
  if damage then
    return damage
  end
end
