#!lua flags=allow-oom
-- Says as which trajectories dead letters are replayed, all or nothing, before anything of them is
-- written there. So a letter is in one trajectory at a time that can ever be trained: another one
-- may take its place only where that one ended before it was in a batch.
--
-- Keys, all in the run's slot:
--   KEYS[1] ledger   hash  read: the letters must be dead, what they become open and the writer's
--   KEYS[2] letters  hash  "<since>:<bytes>:<replayed as>"; changed
-- Arguments:
--   ARGV[1] the writer of what they become
--   ARGV[2...] three per letter: its id; the id of what it becomes; the id of what it became before,
--              where compact records say that this was left out, or nothing
-- Reply:     1
-- Errors:
--   CONFLICT  one is no dead letter that is kept; or was replayed as something that was not left out;
--             or what it is to become is not open, or another writer's

-- include: turnstream.store/slices.lua

local LEFT_OUT = {abandoned = true, surplus = true, incomplete = true}

local changes = {}
for i = 2, #ARGV, 3 do
  local id, target, known = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local since, bytes, before = string.match(
    redis.call('HGET', KEYS[2], id) or '', '^(%d+):(%d+):(.*)$')
  if not since then
    return redis.error_reply('CONFLICT ' .. id .. ' is no dead letter that is kept')
  end
  if before ~= target then
    local entry = before ~= '' and redis.call('HGET', KEYS[1], before)
    local state = entry and string.match(entry, '^[^:]*') or 'over'
    if before ~= '' and before ~= known and not LEFT_OUT[state] then
      return redis.error_reply('CONFLICT ' .. id .. ' was replayed as ' .. before .. ', which is '
        .. state)
    end
    local writer = string.match(redis.call('HGET', KEYS[1], target) or '', '^open:%d+:(.*)$')
    if writer ~= ARGV[1] then
      return redis.error_reply('CONFLICT ' .. target .. ' is not open for the replay of ' .. id)
    end
    changes[#changes + 1] = id
    changes[#changes + 1] = since .. ':' .. bytes .. ':' .. target
  end
end
if #changes > 0 then
  write_sliced('HSET', KEYS[2], changes)
end
return 1
