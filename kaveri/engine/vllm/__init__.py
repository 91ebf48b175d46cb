"""Runs a model on vLLM: our loop around its in-process engine, our push connector on its hooks. Needs vLLM (0.32).

engine       the seam's calls; requests is the table of what it was given, request and entry its cells, life what
             happens to one: states, events, step(state, event)
steps        one turn of the engine's thread: gives vLLM what is new, lets it step, applies the outcome
core         vLLM's in-process engine, all that is touched of it
connector    what vLLM calls: connector_scheduler beside its scheduler, connector_worker beside the model, in every
             rank; memory is where the KV lies
data_plane   the ranks' transfers as one. rank is a rank as the engine sees it and the calls to it: rank_plane in
             this process, remote_rank and rank_server for one in a process of its own
draws        what vLLM samples with; sampling, options and loading translate a user's words
"""
