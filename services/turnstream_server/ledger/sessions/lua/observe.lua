#!lua
-- Declares an observer of a run, or resumes one: see declare_observer in observers.py. An expired one
-- receives the first step that it missed, until it has seen another one.
--
-- Arguments: ARGV[1] name    ARGV[2] first step of a new observer, 0 for the one after the last stepped
--            ARGV[3] expiry in ms    ARGV[4] owner of the caller's key
--            ARGV[5] 1 if it may use any observer
--            ARGV[6] limit of observers of an owner    ARGV[7] limit of observers of the run
-- Reply:     {the next step that it has not seen; the first step that it missed, 0 for none}

local FRONTIER, OBSERVERS, CLOCK, WAKE = unpack(KEYS)

-- include: turnstream.store.run/run_clock.lua
-- include: observer_of.lua

local stepped, planned = unpack(redis.call('HMGET', FRONTIER, 'stepped', 'planned'))
if not stepped then
  return redis.error_reply('NORUN no such run')
end

local function why_too_many()
  local num_own, num_live = 0, 0
  for _, entry in ipairs(redis.call('HVALS', OBSERVERS)) do
    local _, expires_ms, _, _, owner = fields_of(entry)
    if expires_ms ~= '0' then
      num_live = num_live + 1
      num_own = num_own + (owner == '@' .. ARGV[4] and 1 or 0)
    end
  end
  if num_own >= tonumber(ARGV[6]) then
    return 'the key has ' .. num_own .. ' observers of the run; the limit is ' .. ARGV[6]
  elseif num_live >= tonumber(ARGV[7]) then
    return 'the run has ' .. num_live .. ' observers; the limit is ' .. ARGV[7]
  end
end

local seen, expires_ms, _, missed, owner = fields_of(redis.call('HGET', OBSERVERS, ARGV[1]))
local refusal = refused_to(ARGV[4], ARGV[5], owner)
if refusal then
  return refusal
end
missed = string.match(missed or '', '%d+')
if not seen or expires_ms == '0' then
  local why = why_too_many()
  if why then
    return redis.error_reply('INVALID ' .. why .. ': `turnstream run remove-observer` removes one')
  end
  if tonumber(ARGV[2]) > (planned or 0) + 1 then
    return redis.error_reply('INVALID first_step: ' .. ARGV[2] .. ' is after step '
      .. (planned or 0) + 1 .. ', the next one to plan')
  end
  local before = seen
  seen = ARGV[2] == '0' and stepped or ARGV[2] - 1
  missed = before and tonumber(before) < tonumber(seen) and before + 1
end
local released = redis.call('HGET', FRONTIER, 'released') or 0
if tonumber(seen) < tonumber(released) then
  return redis.error_reply('RELEASED step ' .. seen + 1 .. ' is no longer retained: the oldest '
    .. 'batch kept is ' .. released + 1)
end
missed = tonumber(missed or 0) or 0
owner = owner and owner ~= '' and owner or '@' .. ARGV[4]
redis.call('HSET', OBSERVERS, ARGV[1], string.format('%.0f:%.0f:%.0f', seen, run_ms() + ARGV[3],
  ARGV[3]) .. (missed > 0 and string.format(':%.0f', missed) or '') .. owner)
redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
return {seen + 1, missed}
