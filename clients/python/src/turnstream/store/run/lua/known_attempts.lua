#!lua
-- Part of open_group: refuses an attempt of a sample whose earlier attempts are not known.
--
-- Attempt 0 of every sample is known with its group. A further one is known by its ledger entry, or by
-- a granted refill. A writer that has opened its attempt before may repeat that: the store may have
-- lost the attempts before it. A granted refill has no limit here, but `max_refills` of the run.
--
-- Needs LEDGER and REFILLS, keys; `ids` with their `attempts`; `samples` and `again`.
-- Gives why_no_attempt(most), the reason for a refusal. nil where each attempt is known, or is below
--       `most` and follows a known one.

local function name_of(id, attempt)
  return string.match(id, '^.*/') .. string.format('%.0f', attempt)
end

local function is_known(id)
  return redis.call('HEXISTS', LEDGER, id) == 1 or redis.call('ZSCORE', REFILLS, id)
end

local function why_no_attempt(most)
  local named = {}
  for i, id in ipairs(ids) do
    local attempt = attempts[i]
    if attempt > 0 then
      named[id] = true
    end
    if attempt >= most and not is_known(id) then
      return string.format('%.0f of trajectory %s is above %.0f, the highest of this group: %s samples '
        .. 'and a name of %d bytes', attempt, id, most - 1, samples, #ARGV[1])
    end
    if attempt > 1 and again == '' and not named[name_of(id, attempt - 1)]
      and not is_known(name_of(id, attempt - 1)) and not is_known(id) then
      local highest = attempt - 2
      while highest > 0 and not is_known(name_of(id, highest)) do
        highest = highest - 1
      end
      return string.format('%.0f of trajectory %s is above %.0f, the one after the highest known attempt '
        .. 'of the sample', attempt, id, highest + 1)
    end
  end
end
