"""Speculation: proposers guess the next tokens, the model checks all of them in one step."""
