"""What a model writes, taken apart as it comes: reasoning, tool calls, and what is for the user.

Parsers are pure. Whatever the pieces in which a text comes, what they make of it is the same; so a stream and a whole
answer cannot differ.
"""
