"""The kill matrix: real processes under load that are killed, frozen and cut off at random, again and again.

Two routers, two prefill and three decode instances with replication, a predictor and Redis. Every answer is compared
with that of an undisturbed run: tokens, text, log-probabilities, finish reason. Now and then, and at the end, the load
stops, and nothing may be left.

    python -m tests.kill_matrix --engine fake --faults 1000 --seed 1
    python -m tests.kill_matrix --engine kaveri-tiny --faults 200 --kinds killed frozen
"""

import argparse
import asyncio
import json
import os
import sys

from tests.kill_matrix.cluster import ENGINES
from tests.kill_matrix.matrix import MatrixOptions, run_matrix
from tests.kill_matrix.plan import HitKind


def main() -> int:
    default = MatrixOptions()
    parser = argparse.ArgumentParser(prog="python -m tests.kill_matrix", description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=tuple(ENGINES), default=default.engine)
    parser.add_argument("--pairs", action="store_true", help="keep copies in the pools, where prompts are computed")
    parser.add_argument("--faults", type=int, default=default.faults)
    parser.add_argument("--seed", type=int, default=default.seed, help="of questions and faults; not of their timing")
    parser.add_argument("--clients", type=int, default=default.clients, help="requests at once")
    parser.add_argument("--lease-ttl-s", type=float, default=default.lease_ttl_s, help="more on a busy machine")
    parser.add_argument("--together", type=int, default=default.together, help="most faults at once")
    parser.add_argument(
        "--rest-every", type=int, default=default.rest_every, help="faults between two looks at the rest"
    )
    kinds = [kind.value for kind in HitKind]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds[:4], help="what happens to processes")
    parser.add_argument("--keep-logs", action="store_true", help="also when nothing was wrong")
    parser.add_argument("--account", help="file to write the account to, as JSON")
    given = vars(parser.parse_args())
    path = given.pop("account")
    given["kinds"] = tuple(HitKind(kind) for kind in given["kinds"])
    # gRPC's core would write about every connection that breaks.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    account = asyncio.run(run_matrix(MatrixOptions(**given)))
    text = json.dumps(account, indent=1)
    if path:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    print(text)
    return 1 if account["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
