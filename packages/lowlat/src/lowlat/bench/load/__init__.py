"""Load over HTTP against any OpenAI-compatible server: clients, prompts, traces, and what was measured."""
