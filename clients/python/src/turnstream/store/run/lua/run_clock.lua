#!lua
-- Included: run_ms(), the time of the run, as its leader keeps it in leader_fields.py. CLOCK is the key
-- `clock`. Without a clock it is the store's time.
--
-- At least the time that the planner will count for now, so that no deadline fires too early; at most
-- most_ms more, if the store's clock was set since the planner last wrote.

-- include: server_time.lua

local function run_ms()
  local now_ms = server_ms()
  local ms, at_ms, most_ms = unpack(redis.call('HMGET', CLOCK, 'ms', 'at_ms', 'most_ms'))
  if not ms then
    return now_ms
  end
  local since_ms, longest_ms = now_ms - at_ms, tonumber(most_ms)
  if since_ms < 0 or since_ms > longest_ms then
    since_ms = longest_ms
  end
  return ms + since_ms
end
