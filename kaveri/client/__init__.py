"""The Python SDK: AsyncClient is the implementation, Client a facade. Its names are imported from `kaveri`."""
