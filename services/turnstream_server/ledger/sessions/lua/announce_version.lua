#!lua flags=allow-oom
-- Announces new weights to generators and the planner, once, and wakes groups that wait for it:
-- see open_group.lua.
--
-- Arguments: ARGV[1] session epoch    ARGV[2] version    ARGV[3] the record
--            ARGV[4] session name, or "", see stepped.lua    ARGV[5] lineage that the record names
--            ARGV[6] step that the record names
-- Reply:     1, or 0 where an equal record was announced before
-- Errors:
--   NORUN     no such run
--   FENCED    another trainer session has started, or the run has another lineage
--   CONFLICT  the version was announced with another content, or a higher one was

local FRONTIER, VERSIONS, EVENTS, WAKE = unpack(KEYS)

-- include: present_session.lua

local frontier, refusal = present_session(ARGV[1], ARGV[4])
if refusal then
  return refusal
elseif ARGV[5] ~= frontier.lineage then
  return redis.error_reply('FENCED the run goes on in lineage "' .. frontier.lineage .. '", not in "'
    .. ARGV[5] .. '"')
end

local function record_step()
  if tonumber(ARGV[6]) > tonumber(frontier.announced or -1) then
    redis.call('HSET', FRONTIER, 'announced', ARGV[6])
    redis.call('XADD', WAKE, 'MAXLEN', 1, '*', 'w', '')
  end
end

local id = string.format('%.0f-0', ARGV[2] + 1)
local known = redis.call('XRANGE', VERSIONS, id, id)[1]
if known then
  if known[2][2] == ARGV[3] then
    record_step()
    return 0
  end
  return redis.error_reply('CONFLICT version ' .. ARGV[2] .. ' was announced with another content')
end
local newest = redis.call('XREVRANGE', VERSIONS, '+', '-', 'COUNT', 1)[1]
newest = newest and tonumber(string.match(newest[1], '^%d+')) - 1 or -1
newest = math.max(newest, tonumber(frontier.version_floor or -1))
if tonumber(ARGV[2]) <= newest then
  return redis.error_reply('CONFLICT version ' .. ARGV[2] .. ' is not above ' .. newest
    .. ', the newest announced')
end
redis.call('XADD', VERSIONS, id, 'r', ARGV[3])
redis.call('XADD', EVENTS, '*', 'r', ARGV[3])
record_step()
return 1
