#!lua
-- Part of mark_dead, reject_events and withdraw_plans: marks a trajectory as dead, notifies the planner,
-- and keeps the payload as a dead letter. `state` is the state before.
--
-- LEDGER, COUNTS, EVENTS, LETTERS, DEADLINES and HELD are the keys.

local function set_dead(id, state, reason, record)
  local bytes = string.match(redis.call('HGET', HELD, id) or '', '%d+') or 0
  redis.call('HSET', LEDGER, id, 'dead:' .. reason)
  redis.call('ZREM', DEADLINES, 'reward:' .. id)
  redis.call('HINCRBY', COUNTS, state, -1)
  redis.call('HINCRBY', COUNTS, 'dead', 1)
  redis.call('HINCRBY', COUNTS, 'dead_bytes', bytes)
  redis.call('HSET', LETTERS, id, now_text() .. ':' .. bytes)
  redis.call('XADD', EVENTS, '*', 'r', record)
end
