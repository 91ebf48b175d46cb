"""Poll intervals, timeouts and backoffs of the services, in seconds. Polling is only for changes without an event."""

PREFILL_LOOK_S = 1.0
"""Router poll interval while no prefill instance accepts a request."""
QUEUE_FULL_RETRY_S = 0.5
"""Retry delay that a prefill instance with a full queue sends to routers."""
PROMPT_BLOCKS_RETRY_S = 0.02
"""Poll interval for blocks of aborted requests, which become free without an event once no transfer can touch them."""
ROOM_PATIENCE_S = 0.1
"""Time for a decode instance that reported free blocks to answer before others are asked as well."""
ROOM_REST_WHEN_REFUSED_S = 0.05
"""Pause before a decode instance that refused, because it serves another phase now, is asked again."""
ROOM_REST_WHEN_FAILED_S = 0.5
"""Time for which a decode instance is not used after a failed push or connection."""
ROOM_LOOK_S = 0.25
"""Poll interval for free decode blocks, of a prefill instance whose cluster view does not change."""
NO_DECODE_INSTANCE_S = 2.0
"""A request fails after this long without any decode instance; its router may know of others."""
LINE_LOOK_S = 0.002
"""Poll interval for free blocks while requests wait: blocks of aborted requests become free without an event."""
COPY_LOOK_S = 0.1
"""Poll interval of an instance for requests that need a KV copy elsewhere."""
COPY_REQUESTS_MAX = 32
"""Max unanswered reservations of memory for KV copies, per instance."""
NO_HOLDER_S = 0.3
"""Pause of an instance after it found no other instance to hold a KV copy."""
HOLDER_REST_S = 1.0
"""Time for which a holder of KV copies is not used after it did not answer or lost a copy."""
COPY_STARVED_S = 3.0
"""After waiting this long for its next block, a KV copy is closed; its owner looks for another holder."""
COPY_MADE_ROOM_RETRY_S = 0.1
"""Retry delay that a holder sends after it has dropped shorter copies to make room."""
