"""Reads tool calls and reasoning from the text of answers, as families of models write them. Pure.

A parser takes the text in any pieces, and what it gives depends on their whole alone: parts of one kind that follow
each other, joined, are the same for every split. So a gateway that goes on with an answer needs the text alone.
"""
