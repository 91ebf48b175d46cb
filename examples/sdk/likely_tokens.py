"""Token ids, log-probabilities, and draws that can be repeated.

python examples/sdk/likely_tokens.py [ROUTER,ROUTER]
"""

import math
import sys

from kaveri import Client, SamplingParams

targets = sys.argv[1].split(",") if len(sys.argv) > 1 else ["127.0.0.1:50051"]
with Client(targets) as client:
    prompt = client.tokenize("The river")
    print(f"{len(prompt)} tokens: {client.detokenize(prompt)!r}")

    params = SamplingParams(temperature=0.8, seed=7, max_tokens=5, ignore_eos=True, logprobs=3)
    answer = client.generate(prompt_token_ids=prompt, params=params)
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        likely = zip(entry.top_texts, entry.top, strict=True)
        others = ", ".join(f"{text!r} {math.exp(logprob):.2f}" for text, (_, logprob) in likely)
        print(f"{token_id:6} {entry.text!r} {math.exp(entry.logprob):.2f} of {others}")

    again = client.generate(prompt_token_ids=prompt, params=params)
    print(f"the same draws again: {again.token_ids == answer.token_ids}")
