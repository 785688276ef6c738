-- Cached prompts: which of a tenant's next jobs goes first. Part of `claim`, whose variables it uses.

-- Moves each member whose prompt is cached forward by at most 3 places: past members whose prompt is not cached, of the same
-- priority, and less than a second older. So later jobs can delay a job only for a bounded time, and nothing has to be counted. The
-- order is correct for at least the first `most` members. Returns whether a member moves.
local function put_cached_first(key, members, most)
  local sub, search, num_front, num_found, ranks, last, is_found = string.sub, string.find, 0, 0, nil, nil, nil
  for rank = 1, #members do
    local beginning = sub(members[rank], 18, 25)
    if beginning ~= last then last, is_found = beginning, search(cached, beginning, 1, true) end
    if is_found and num_front == rank - 1 then
      num_front = rank
    elseif is_found then
      ranks, num_found = ranks or {}, num_found + 1
      ranks[num_found] = rank
    end
    if is_found and num_front + num_found == most then break end
  end
  if not ranks then return false end
  local oldest, youngest = members[num_front + 1], members[ranks[num_found]]
  local scores = redis.call('ZMSCORE', key, oldest, youngest)
  local may_all_move = scores[1] == scores[2] and sub(youngest, 1, 16) - sub(oldest, 1, 16) < 1000000  -- microseconds
  if not may_all_move then scores = redis.call('ZMSCORE', key, unpack(members)) end
  for i = 1, num_found do
    local rank, place = ranks[i], ranks[i] - 3
    local member = members[rank]
    if place <= num_front then place = num_front + 1 end
    while not may_all_move and place < rank
        and (scores[place] ~= scores[rank] or sub(member, 1, 16) - sub(members[place], 1, 16) >= 1000000) do
      place = place + 1
    end
    for to = rank, place + 1, -1 do members[to] = members[to - 1] end
    members[place], num_front = member, place
  end
  return true
end
