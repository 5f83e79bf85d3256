"""Parsers of a model's output, which find reasoning, tool calls and the content for the user while the text comes.

Parsers are pure, and their result does not depend on the pieces in which a text comes. So a stream and a whole answer
cannot differ.
"""
