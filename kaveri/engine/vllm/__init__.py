"""Runs a model on vLLM: our loop around its in-process engine, our push connector on its hooks. Needs vLLM (0.32).

engine       calls of the engine contract, and the engine's thread
steps        one iteration of that thread: submits requests to vLLM, runs a step, applies the results
requests     table of all requests; request holds one, life its states, events and step(state, event)
core         every access to vLLM's in-process engine
connector    vLLM's hooks: connector_scheduler next to its scheduler, connector_worker next to the model in every rank;
             memory exposes vLLM's KV cache
data_plane   transfers of all ranks as one; rank is the interface of a rank, rank_plane a rank in this process,
             remote_rank and rank_server a rank in a process of its own
draws        sampling within vLLM; sampling, options and loading translate a user's settings
"""
