#!lua
-- Included: server_ms(), and now_text(), the same as digits.

local function server_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function now_text()
  return string.format('%.0f', server_ms())
end
