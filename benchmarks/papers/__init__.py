"""Experiments of the papers, repeated here."""
