"""Three ways to end a request early. In each the cluster stops computing it within a second, and frees its memory.

python examples/sdk/deadlines.py [ROUTER,ROUTER]
"""

import sys
import threading

from kaveri import Client, DeadlineExceeded, FinishReason, SamplingParams

targets = sys.argv[1].split(",") if len(sys.argv) > 1 else ["127.0.0.1:50051"]
# As long as the model allows.
LONG = SamplingParams(ignore_eos=True)
with Client(targets) as client:
    try:
        client.generate("A long answer, please.", params=LONG, timeout_s=0.001)
    except DeadlineExceeded as late:
        print(f"deadline: {late}")

    tokens = 0
    for chunk in client.stream("A long answer, please.", params=LONG):
        tokens += len(chunk.token_ids)
        if tokens >= 3:
            # Nothing else refers to the stream, so this cancels the request.
            break
    print(f"left after {tokens} tokens")

    stream = client.stream("A long answer, please.", params=LONG, request_id="report-17")
    first = next(stream)
    # From another thread here; another process can do it, too.
    canceller = threading.Thread(target=client.cancel, args=("report-17",))
    canceller.start()
    rest = stream.collect()
    canceller.join()
    print(f"cancelled by id: {rest.finish_reason is FinishReason.CANCELLED}")
