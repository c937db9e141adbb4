#!lua flags=allow-oom
-- Sets a sealed trajectory aside because it is damaged, tells the plan, and keeps it as a dead letter.
--
-- Keys, all in the run's slot:
--   KEYS[1] leader     hash    read: epoch
--   KEYS[2] ledger     hash    trajectory id: "sealed:<epoch>" or "awaiting_reward:<epoch>" becomes
--                              "dead:<reason>"
--   KEYS[3] counts     hash    changed: sealed or awaiting_reward, dead, dead_bytes
--   KEYS[4] events     stream  added, once: field r = the trajectory_died record
--   KEYS[5] letters    hash    added: trajectory id -> "<since, server ms>:<bytes>"
--   KEYS[6] deadlines  zset    removed: "reward:<trajectory id>"
-- Arguments:
--   ARGV[1] leader epoch    ARGV[2] trajectory id    ARGV[3] reason    ARGV[4] the record
--   ARGV[5] bytes of its payload
-- Reply:     1, or 0 where it was dead before
-- Errors:
--   FENCED    another planner leads
--   CONFLICT  the trajectory is not sealed, or already in a batch

local LEDGER, COUNTS, EVENTS, LETTERS, DEADLINES = KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]

-- include: set_dead.lua

if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then
  return redis.error_reply('FENCED another planner leads the run, not epoch ' .. ARGV[1])
end
local entry = redis.call('HGET', KEYS[2], ARGV[2])
local state = string.match(entry or '', '^[^:]*')
if state == 'dead' then
  return 0
end
if state ~= 'sealed' and state ~= 'awaiting_reward' then
  return redis.error_reply('CONFLICT ' .. ARGV[2] .. ' is ' .. (entry or 'unknown')
    .. ', not sealed')
end

-- include: turnstream.store.run/whole_numbers.lua

local damage = damaged(COUNTS)
if damage then
  return damage
end
set_dead(ARGV[2], state, ARGV[3], ARGV[4], ARGV[5])
return 1
