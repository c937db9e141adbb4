#!lua flags=allow-oom
-- Included: read_sliced(command, key, names), the replies for all names in one table, and
-- write_sliced(command, key, words), where words that belong together come in pairs: add(words, first,
-- second). `unpack` fails above about 8,000 values.

local SLICE = 1000  -- an even number: no pair is cut

local function add(words, first, second)
  words[#words + 1] = first
  words[#words + 1] = second
end

local function slices(command, key, words, take)
  for start = 1, #words, SLICE do
    take(redis.call(command, key, unpack(words, start, math.min(start + SLICE - 1, #words))))
  end
end

local function read_sliced(command, key, names)
  local replies = {}
  slices(command, key, names, function(some)
    for _, reply in ipairs(some) do
      replies[#replies + 1] = reply
    end
  end)
  return replies
end

local function write_sliced(command, key, words)
  local changed = 0
  slices(command, key, words, function(number)
    changed = changed + number
  end)
  return changed
end
