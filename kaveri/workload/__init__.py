"""Which requests come when and how long they are: synthetic, from traces, from files of prompts."""
