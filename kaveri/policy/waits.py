"""How long the services wait before they look again for something that was not there. Pure.

Only for what comes without an event. Everything else wakes its waiters at once.
"""

PREFILL_LOOK_S = 1.0
"""A router, between two looks for a prefill instance that takes a request."""
QUEUE_FULL_RETRY_S = 0.5
"""What a prefill instance with a full queue asks of routers."""
PROMPT_BLOCKS_RETRY_S = 0.02
"""Blocks of an aborted request come back without an event, once no transfer can touch them: look again after this."""
ROOM_PATIENCE_S = 0.1
"""A decode instance that showed room has so long to answer before others are asked as well."""
ROOM_REST_WHEN_FAILED_S = 0.5
"""A decode instance is left alone for this time after a push to it failed, or it could not be reached."""
ROOM_LOOK_S = 0.25
"""A prefill instance, between two looks at a view that does not change."""
NO_DECODE_INSTANCE_S = 2.0
"""A request fails when there was no decode instance at all for this long; its router may know of others."""
LINE_LOOK_S = 0.002
"""Blocks of aborted requests come free without an event: while requests wait, free blocks are looked at this often."""
