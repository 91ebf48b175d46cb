"""Where the time of a request went, and which instances served it.

python examples/sdk/where_time_went.py [ROUTER,ROUTER]
"""

import sys

from kaveri import Client, SamplingParams

targets = sys.argv[1].split(",") if len(sys.argv) > 1 else ["127.0.0.1:50051"]
with Client(targets) as client:
    answer = client.generate("Count from 1 to 9.", params=SamplingParams(max_tokens=32, ignore_eos=True))

timing, server = answer.timing, answer.timing.server
assert timing.ttft_s is not None
assert timing.tpot_s is not None
print(f"here: first token after {timing.ttft_s * 1e3:.1f} ms, then {timing.tpot_s * 1e3:.2f} ms per token")
for name in ("router_s", "prefill_queue_s", "prefill_s", "kv_tail_s", "decode_queue_s", "decode_s"):
    print(f"{name:16} {getattr(server, name) * 1e3:8.2f} ms")
print(f"{server.kv_bytes} bytes of KV from {server.prefill_instance_id} to {server.decode_instance_id}", end=" ")
print(f"over {server.kv_transport}; {server.attempts} attempt, {server.reattaches} other routers")
