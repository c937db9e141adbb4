#!lua flags=allow-oom
-- Records that a rank of the present trainer session has a batch, or is about to get it. If it has
-- a batch that the store lost, or another manifest of the step, the session is lost: its ranks may
-- train different data, and are refused from now on.
--
-- Arguments: ARGV[1] session epoch    ARGV[2] session name, or "", see stepped.lua
--            ARGV[3] dp_rank    ARGV[4] step    ARGV[5] manifest hash
--            ARGV[6] "has", or "gets": before the first byte of it is sent
-- Reply:     1
-- Errors:
--   NORUN   no such run
--   FENCED  another trainer session has started
--   BEHIND  the session is lost
--   RANK_UNCONFIRMED  the store has lost the batch that the rank was about to get

local FRONTIER, BATCHES, RANKS, WAKE = unpack(KEYS)

-- include: present_session.lua

local frontier, refusal = present_session(ARGV[1], ARGV[2])
if refusal then
  return refusal
elseif frontier.session_lost then
  return lost_session(frontier.session_lost)
end
local step = tonumber(ARGV[4])
if step < tonumber(frontier.released or 0) then
  return 1  -- a late call: the batch is released
end

local own = hash_of(ARGV[4])
if own ~= ARGV[5] and ARGV[6] == 'gets' then
  return redis.error_reply('RANK_UNCONFIRMED step ' .. step
    .. ': its plan is not in the store any more')
end
if own ~= ARGV[5] then
  local has = own and 'this store has "' .. own .. '" as step ' .. step
    or 'but the newest batch of this store is ' .. (frontier.planned or 0)
  local why = 'step ' .. step .. ' was delivered to dp_rank ' .. ARGV[3] .. ' from the manifest "'
    .. ARGV[5] .. '", ' .. has .. ': begin a new session from the last checkpoint'
  redis.call('HSET', FRONTIER, 'session_lost', ARGV[4] .. ':' .. why)
  redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
  return redis.error_reply('BEHIND ' .. why)
end
if tonumber(frontier.dp_world_size) > 1 then
  local newest, hash = string.match(redis.call('HGET', RANKS, ARGV[3]) or '', '^(%d+):(.*)$')
  if not newest or tonumber(newest) < step or hash_of(newest) ~= hash then
    redis.call('HSET', RANKS, ARGV[3], ARGV[4] .. ':' .. ARGV[5])
  end
end
return 1
