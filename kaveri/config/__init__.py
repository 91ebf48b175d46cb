"""Settings: declared once as fields of a dataclass, read from flags, variables and a file."""
