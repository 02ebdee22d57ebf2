"""Answers that follow a grammar: a JSON schema, a regular expression, a list of choices.

XGrammar compiles grammars and says which tokens may come next. It works in processes of its own, one for each grammar,
since it cannot be interrupted: `worker.py` is such a process, `pool.py` starts and ends them, `matcher.py` is one
request's side of the talk.
"""
