#!lua
-- Part of mark_dead and reject_events: marks a trajectory as dead, notifies the planner, and keeps
-- the payload as a dead letter. `state` is the present state: "sealed" or "awaiting_reward".

local function set_dead(id, state, reason, record, bytes)
  local time = redis.call('TIME')
  local since = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
  redis.call('HSET', LEDGER, id, 'dead:' .. reason)
  redis.call('HINCRBY', COUNTS, state, -1)
  redis.call('HINCRBY', COUNTS, 'dead', 1)
  redis.call('HINCRBY', COUNTS, 'dead_bytes', bytes)
  redis.call('HSET', LETTERS, id, since .. ':' .. bytes)
  redis.call('ZREM', DEADLINES, 'reward:' .. id)
  redis.call('XADD', EVENTS, '*', 'r', record)
end
