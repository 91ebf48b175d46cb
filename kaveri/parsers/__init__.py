"""Reads tool calls and reasoning from the text of answers, in the formats of several model families. Pure.

Results do not depend on how the text is split into pieces: adjacent parts of one kind, joined, are the same for every
split. A gateway that resumes an answer therefore needs only its text.
"""
