"""Arrival times and lengths of requests: synthetic, from traces, or from files of prompts."""
