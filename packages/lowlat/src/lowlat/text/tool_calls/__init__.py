"""Readers of model answers: reasoning, content and tool calls, one room a format."""
