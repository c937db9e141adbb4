#!lua
-- Included: lease_end(now_ms, lease_ms), and new_lease(), the time now, the length and the end of a
-- lease that begins now, in ms of server time; nil where there is no run. CONFIG is the key `config`.
--
-- After lease_s was lowered, no lease ends before every writer knows it: a writer asks within a third of
-- the length that it knows. A floor that is further away than it ever was is from before the clock was
-- set back.

-- include: server_time.lua

local function lease_end(now_ms, lease_ms)
  local floor_ms, most_ms = string.match(
    redis.call('HGET', CONFIG, 'lease_floor') or '', '^(%d+):(%d+)$')
  if floor_ms and floor_ms - now_ms <= tonumber(most_ms) then
    return math.max(now_ms + lease_ms, tonumber(floor_ms))
  end
  return now_ms + lease_ms
end

local function new_lease()
  local newest = redis.call('HGET', CONFIG, 'newest')
  if not newest then
    return nil
  end
  local config = cjson.decode(redis.call('HGET', CONFIG, newest))
  local lease_ms = math.floor(config.lease_s * 1000)
  local now_ms = server_ms()
  return now_ms, lease_ms, lease_end(now_ms, lease_ms)
end
