#!lua
-- Part of find_ended and fold_ended: defines has_ended(entry), which tells whether a trajectory with
-- this ledger entry ended untrained. A dead one counts once it is discarded.

local ENDS = {filtered = true, expired = true, surplus = true, incomplete = true, evaluated = true,
  abandoned = true}

local function has_ended(entry)
  return ENDS[string.match(entry, '^[^:]*')] or string.sub(entry, 1, 14) == 'dead:discarded'
end
