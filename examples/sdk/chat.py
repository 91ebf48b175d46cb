"""A conversation. Each answer is printed while it is generated.

python examples/sdk/chat.py [ROUTER,ROUTER] < questions.txt
"""

import sys

from kaveri import Client, Message, SamplingParams

targets = sys.argv[1].split(",") if len(sys.argv) > 1 else ["127.0.0.1:50051"]
turns = [Message("system", "You are brief.")]
with Client(targets) as client:
    for question in sys.stdin:
        turns.append(Message("user", question.strip()))
        answer = ""
        # Leaving the block early, by an exception for example, cancels the request everywhere.
        with client.stream(messages=turns, params=SamplingParams(max_tokens=64)) as stream:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
                answer += chunk.text
        print()
        turns.append(Message("assistant", answer))
