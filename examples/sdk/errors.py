"""What can go wrong. Errors carry data, so that a program need not read their texts.

python examples/sdk/errors.py [ROUTER,ROUTER]
"""

import sys

import kaveri

targets = sys.argv[1].split(",") if len(sys.argv) > 1 else ["127.0.0.1:50051"]
with kaveri.Client(targets) as client:
    # Before anything is sent.
    try:
        kaveri.SamplingParams(temperature=-1)
    except kaveri.InvalidArgument as error:
        print(f"{error.field} is {error.value}; it must be {error.limit}")

    # By the router, which knows the model's length.
    too_long = [1] * (client.list_models()[0].max_model_len + 1)
    try:
        client.generate(prompt_token_ids=too_long)
    except kaveri.InvalidArgument as error:
        print(f"refused: {error.limit}")

    try:
        client.generate("Hello", model="another-model")
    except kaveri.ModelNotFound as error:
        print(f"{error.model} is not served")

    with client.stream(
        "Hello", request_id="once", params=kaveri.SamplingParams(max_tokens=256, ignore_eos=True)
    ) as stream:
        next(stream)
        try:
            client.generate("Hello", request_id="once")
        except kaveri.RequestAlreadyExists as error:
            print(f"{error.request_id} is in flight already")

# No router there: calls go on trying until their deadline.
with kaveri.Client("127.0.0.1:1", timeout_s=1) as client:
    try:
        client.list_models()
    except (kaveri.Unavailable, kaveri.DeadlineExceeded) as error:
        print(f"{type(error).__name__}: no router answers")
