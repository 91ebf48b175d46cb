"""Lua scripts of redis_store: its atomic operations. None reads Redis's clock. The counters are a Redis hash: `state`,
a random name, new whenever Redis has lost its content; `registration` and `token`, the last numbers issued."""

# The latest registration owns an instance id. A new incarnation takes it at once. One that has registered before takes
# it back only from an older one; numbers order two incarnations only if both were drawn in one state of Redis.
# Otherwise the current one keeps it: it registered after that state was lost.
#
# KEYS: the instance, the set of ids, the counters.
# ARGV: registration or "", incarnation, instance id, status, lease in ms, channel, name for a new state, greatest
# fencing token known.
# Returns the registration, or "" when a newer incarnation holds the id; then the status of that incarnation, or of one
# that had to leave, or "".
HEARTBEAT = """
local state = redis.call('HGET', KEYS[3], 'state')
if not state then
  state = ARGV[7]
  redis.call('HSET', KEYS[3], 'state', state)
end
if tonumber(ARGV[8]) > tonumber(redis.call('HGET', KEYS[3], 'token') or 0) then
  redis.call('HSET', KEYS[3], 'token', ARGV[8])
end
local registration, other = ARGV[1], ''
local held = redis.call('GET', KEYS[1])
local held_state, held_number, holder, held_status
if held then held_state, held_number, holder, held_status = string.match(held, '^(%x+)%.(%d+):(%d+):(.*)$') end
if holder and holder ~= ARGV[2] then
  local own_state, own_number = string.match(registration, '^(%x+)%.(%d+)$')
  if own_state and (own_state ~= held_state or tonumber(own_number) < tonumber(held_number)) then
    return {'', held_status}
  end
  other = held_status
elseif holder and registration == '' then
  registration = held_state .. '.' .. held_number
end
if registration == '' then registration = state .. '.' .. redis.call('HINCRBY', KEYS[3], 'registration', 1) end
redis.call('SET', KEYS[1], registration .. ':' .. ARGV[2] .. ':' .. ARGV[4], 'PX', ARGV[5])
redis.call('SADD', KEYS[2], ARGV[3])
redis.call('PUBLISH', ARGV[6], '+' .. ARGV[4])
return {registration, other}
"""

# KEYS: the instance, the set of ids. ARGV: incarnation, instance id, status, channels.
DEREGISTER = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%x+%.%d+:(%d+):') == ARGV[1] then
  redis.call('DEL', KEYS[1])
  redis.call('SREM', KEYS[2], ARGV[2])
  redis.call('PUBLISH', ARGV[4], '-' .. ARGV[3])
  redis.call('PUBLISH', ARGV[5], '-' .. ARGV[3])
end
"""

# Removes ids with expired leases from the set. KEYS: the set of ids, the instances. ARGV: their ids.
FORGET_ENDED = """
for number, instance_id in ipairs(ARGV) do
  if redis.call('EXISTS', KEYS[number + 1]) == 0 then redis.call('SREM', KEYS[1], instance_id) end
end
"""

# A leader whose token is not the greatest known, because Redis lost its state, draws a greater one: followers would
# ignore it otherwise. A lease longer than it was granted is cut: Redis's clock went back.
#
# KEYS: the leader, the counters. ARGV: candidate, lease in ms, greatest token known.
# Returns the token, or 0 when another leads; then the greatest token now.
CAMPAIGN = """
local last = math.max(tonumber(redis.call('HGET', KEYS[2], 'token') or 0), tonumber(ARGV[3]))
redis.call('HSET', KEYS[2], 'token', string.format('%.0f', last))
local held = redis.call('GET', KEYS[1])
if held then
  local token, lease, holder = string.match(held, '^(%d+):(%d+):(.*)$')
  if holder ~= ARGV[1] then
    if lease and redis.call('PTTL', KEYS[1]) > tonumber(lease) then redis.call('PEXPIRE', KEYS[1], lease) end
    return {'0', string.format('%.0f', last)}
  end
  if tonumber(token) < last then held = false else last = tonumber(token) end
end
if not held then
  last = last + 1
  redis.call('HSET', KEYS[2], 'token', string.format('%.0f', last))
end
local token = string.format('%.0f', last)
redis.call('SET', KEYS[1], token .. ':' .. ARGV[2] .. ':' .. ARGV[1], 'PX', ARGV[2])
return {token, token}
"""

# KEYS: the leader. ARGV: candidate.
RESIGN = """
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^%d+:%d+:(.*)$') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""

# KEYS: the leader. ARGV: token, broadcast, channel. Returns whether the token leads.
BROADCAST = """
local held = redis.call('GET', KEYS[1])
if not held or string.match(held, '^%d+') ~= ARGV[1] then return 0 end
redis.call('PUBLISH', ARGV[3], '=' .. ARGV[2])
return 1
"""

# KEYS: the request, the instance of the router that holds it. ARGV: the value held, that router's incarnation, the new
# value, its time to live in ms. Returns whether the claim was taken over: not while that incarnation's lease holds;
# "none" names no incarnation.
TAKE_OVER_REQUEST = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
local lease = redis.call('GET', KEYS[2])
if lease and string.match(lease, '^%x+%.%d+:(%d+):') == ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[3], 'PX', ARGV[4])
return 1
"""

# KEYS: requests. ARGV: the values of this router incarnation's claims.
CLOSE_REQUESTS = """
local function holder(value) return value and string.match(value, '^(.*)\\n') end
for number, key in ipairs(KEYS) do
  if holder(redis.call('GET', key)) == holder(ARGV[number]) then redis.call('DEL', key) end
end
return 1
"""

# KEYS: requests. ARGV: their claims, with the hints to enter. Ended claims, and those held by others, are left alone.
UPDATE_REQUESTS = """
local function holder(value) return value and string.match(value, '^(.*)\\n') end
for number, key in ipairs(KEYS) do
  if holder(redis.call('GET', key)) == holder(ARGV[number]) then redis.call('SET', key, ARGV[number], 'KEEPTTL') end
end
return 1
"""
