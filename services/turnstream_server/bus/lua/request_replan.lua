#!lua flags=allow-oom
-- Asks the leader of a run to plan again what is planned and not stepped, from a damaged step on.
--
-- One request stands at a time: whoever asks for the same meanwhile waits for the same answer. It
-- stands until a leader has answered it, however many of them die meanwhile.
--
-- Keys, all in the run's slot:
--   KEYS[1] frontier  hash    read: stepped, planned; changed: replan, "<name of the request>:<step>"
--   KEYS[2] wake      stream  added, so that the leader is told
-- Arguments: ARGV[1] name of the request    ARGV[2] the damaged step, 0 for the first that is
-- Reply:     the name of the request that stands
-- Errors:
--   NORUN     no such run
--   CONFLICT  the step is stepped, or not planned; or a request for another step stands

local stepped, planned, standing = unpack(
  redis.call('HMGET', KEYS[1], 'stepped', 'planned', 'replan'))
if not stepped then
  return redis.error_reply('NORUN no such run')
end
local step = tonumber(ARGV[2])
if standing then
  local name, its_step = string.match(standing, '^(.*):(%d+)$')
  if tonumber(its_step) ~= step then
    return redis.error_reply('CONFLICT the run is already asked to plan again '
      .. (its_step == '0' and 'its first damaged step' or 'step ' .. its_step))
  end
  return name
end
if step > 0 and step <= tonumber(stepped) then
  return redis.error_reply('CONFLICT step ' .. step .. ' is stepped, and stays as it was planned')
end
if step > tonumber(planned or 0) then
  return redis.error_reply('CONFLICT step ' .. step .. ' is not planned; ' .. (planned or 0)
    .. ' are')
end
redis.call('HSET', KEYS[1], 'replan', ARGV[1] .. ':' .. ARGV[2])
redis.call('XADD', KEYS[2], 'MAXLEN', 1, '*', 'w', '')
return ARGV[1]
