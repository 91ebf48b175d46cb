"""How fast the engines compute."""
