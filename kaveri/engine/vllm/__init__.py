"""Runs a model on vLLM: our loop around its in-process engine, our push connector on its hooks. Needs vLLM (0.32).

engine       the seam's calls and events; board, account and hosted are what its threads know of requests
driver       the engine thread: tells vLLM what is new, lets it make a step, tells what came of it
host         vLLM's in-process engine, all that is touched of it
connector    what vLLM calls: connector_scheduler beside its scheduler, connector_worker beside the model, in every
             rank; orders is what goes from the one to the other, memory and mirror are where the KV lies
data_plane   the ranks' transfers as one. rank is a rank as the engine sees it, in this process or, by remote_rank
             and rank_server, in one of its own; rank_plane is its sender and receiver
draws        what vLLM samples with; sampling, options and loading translate a user's words
"""
