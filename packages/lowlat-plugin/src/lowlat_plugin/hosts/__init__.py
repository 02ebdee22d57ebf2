"""Adapters: the same kernel libraries inside other engines. Nothing here is imported unless that engine asks."""
