"""Grammar processes and the gate before the scheduler: limits, what is kept, and what happens when they end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grammar_kit import EOS, SETTINGS, VOCABULARY, byte_level
from lowlat import Engine, Grammar, SamplingParams
from lowlat.engine.grammar_gate import GrammarGate
from lowlat.engine.request import FinishReason, GenerateRequest
from lowlat.grammars import pool as pools
from lowlat.grammars.grammar import GrammarError, GrammarsBusyError
from lowlat.grammars.matcher import GrammarLine, Matcher
from lowlat.grammars.pool import GrammarLimits, GrammarPool, GrammarProcess
from lowlat.server.tool_plan import behind_reasoning
from lowlat.text.tokenizer import Tokenizer
from lowlat.text.tool_calls.formats import AnswerFormats, Reading

LIMITS = GrammarLimits(seconds=2.0, memory_mib=256, max_bytes=5000, max_depth=10)
HOSTILE = Grammar("regex", "((([a-z]{1,50}){1,50}){1,50}){1,50}")


def make_pool(limits: GrammarLimits = LIMITS) -> GrammarPool:
    return GrammarPool(lambda: Tokenizer.from_json(byte_level()), VOCABULARY, limits)


@pytest.fixture
def pool() -> Iterator[GrammarPool]:
    pool = make_pool()
    yield pool
    pool.close()


def until(pool: GrammarPool, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        pool.poll(0.05)


def compiled(pool: GrammarPool, grammar: Grammar) -> GrammarProcess:
    process = pool.use(grammar)
    until(pool, lambda: process.settled)
    return process


def test_a_grammar_is_compiled_once_and_few_are_kept(pool: GrammarPool):
    first = compiled(pool, Grammar.choice(["0"]))
    assert first.error is None
    assert pool.use(first.grammar) is first
    first.release()
    first.release()
    for n in range(1, 12):
        compiled(pool, Grammar.choice([str(n)])).release()
    assert first.connection is None, "the one used longest ago is gone"
    again = compiled(pool, first.grammar)
    assert again is not first
    assert again.ready


def test_few_are_kept_after_a_crowd_and_after_aborts(pool: GrammarPool):
    processes = [pool.use(Grammar.choice([f"crowd {n}"])) for n in range(12)]
    until(pool, lambda: all(process.settled for process in processes))
    assert all(process.ready for process in processes), "as many as are in use"
    for process in processes:
        process.release()
    assert sum(process.connection is not None for process in processes) == 8
    early = [pool.use(Grammar.choice([f"early {n}"])) for n in range(12)]
    for process in early:
        process.release()
    until(pool, lambda: all(process.settled for process in early))
    assert sum(process.connection is not None for process in early) == 8


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "(a"), "parenthesis is not closed"),
        (Grammar("ebnf", 'start ::= "a"'), '"root" is not found'),
        (Grammar("json_schema", "{"), "not JSON"),
        (Grammar("json_schema", "5"), "a schema is an object"),
        (Grammar("json_schema", '{"const": 1e999}'), "too large"),
        (Grammar("choice", "[]"), "at least one"),
        (Grammar("choice", "[1]"), "a list of texts"),
        (Grammar("structural_tag", '{"type":"structural_tag","format":{"type":"what"}}'), "what"),
        (Grammar("regex", "(" * 11 + "a" + ")" * 11), "--grammar-depth"),
        (HOSTILE, "--grammar-seconds"),
        (Grammar.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (Grammar("ebnf", "root ::= root"), "no text fits it"),
        (Grammar("regex", "[^\\x00-\\U0010ffff]"), "no text fits it"),
        (Grammar.json_schema({"$ref": "https://example.com/schema.json"}), "URI"),
    ],
)
def test_what_does_not_compile_has_a_reason(pool: GrammarPool, grammar: Grammar, message: str):
    process = compiled(pool, grammar)
    assert process.error is not None
    assert message in process.error
    assert ".cc:" not in process.error
    process.release()


def test_a_grammar_that_needs_too_much_memory_is_refused():
    pool = make_pool(GrammarLimits(seconds=20.0, memory_mib=1, max_bytes=5000, max_depth=10))
    process = compiled(pool, Grammar("regex", "[a-z]{1,500}([^é]{1,500}x){1,50}"))
    assert process.error is not None
    assert "--grammar-memory-mib" in process.error
    pool.close()


def test_a_long_text_and_a_crowd_are_refused_at_once(pool: GrammarPool, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(GrammarError, match="--grammar-bytes"):
        pool.use(Grammar("regex", "a" * 5001))
    monkeypatch.setattr(pools, "_MOST_WAITING", 3)
    for n in range(5):
        pool.use(Grammar.choice([str(n)]))
    with pytest.raises(GrammarsBusyError, match="try again later"):
        pool.use(Grammar.choice(["one too many"]))


def test_without_the_library_the_cure_is_named(pool: GrammarPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GrammarError, match="pip install"):
        pool.use(Grammar.choice(["a"]))


def test_the_first_process_may_end_and_is_started_again(pool: GrammarPool):
    compiled(pool, Grammar.choice(["a"])).release()
    assert pool._parent is not None
    os.kill(pool._parent._process.pid, signal.SIGKILL)
    pool._parent._process.wait()
    assert compiled(pool, Grammar.choice(["b"])).ready


def test_a_process_that_was_killed_while_nobody_used_it_is_started_again(pool: GrammarPool):
    grammar = Grammar.choice(["a", "b"])
    first = compiled(pool, grammar)
    first.release()
    assert not first.gone
    assert pool.use(grammar) is first
    first.release()
    assert pool._parent is not None
    parent = pool._parent._process.pid
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)
    until(pool, lambda: first.gone)
    again = compiled(pool, grammar)
    assert again is not first
    assert again.ready
    again.release()


def test_a_hostile_grammar_holds_up_no_other(pool: GrammarPool):
    hostile, plain = pool.use(HOSTILE), pool.use(Grammar.choice(["a"]))
    until(pool, lambda: plain.settled)
    assert plain.ready
    until(pool, lambda: hostile.settled)


def test_a_process_that_ends_in_the_middle_ends_its_own_requests_only(byte_folder: Path):
    with Engine(model=str(byte_folder), **SETTINGS) as engine:
        core = engine._core
        first, second = Grammar("regex", "[ab]{500}"), Grammar("regex", "[cd]{300}")
        for grammar in (first, second):  # both have compiled when their requests come, so that these run side by side
            engine.generate([1], SamplingParams(max_tokens=1, grammar=grammar))
        for id, grammar in (("first", first), ("second", second), ("plain", None)):
            sampling = SamplingParams(max_tokens=300, temperature=0, grammar=grammar, ignore_eos=True)
            core.submit(GenerateRequest(id=id, prompt_ids=[1, 2], sampling=sampling))
        tokens: dict[str, int] = {}
        ends: dict[str, Any] = {}
        killed = False
        while core.has_work:
            for output in core.turn():
                tokens[output.id] = tokens.get(output.id, 0) + len(output.token_ids)
                if output.finish_reason is not None:
                    ends[output.id] = (output.finish_reason, output.error)
            if not killed and tokens.get("first", 0) > 3 and tokens.get("second", 0) > 3:
                assert not ends
                killed = True
                assert core.grammars is not None
                process = core.grammars._pool._processes[first]
                assert process.connection is not None
                # What the process itself would do after half a second in one place.
                import socket

                socket.socket(fileno=os.dup(process.connection.fileno())).shutdown(socket.SHUT_RDWR)
        assert ends["first"][0] is FinishReason.ERROR
        assert "to follow; make it simpler" in ends["first"][1]
        assert ends["second"] == (FinishReason.LENGTH, None)
        assert ends["plain"] == (FinishReason.LENGTH, None)
        core.scheduler.check()
        again = engine.generate([1], SamplingParams(max_tokens=600, seed=1, grammar=first))
        assert again.finish_reason == "stop"


def test_a_request_can_be_aborted_while_its_grammar_compiles(pool: GrammarPool):
    gate = GrammarGate(pool, (EOS,))
    request = GenerateRequest(id="a", prompt_ids=[1], sampling=SamplingParams(grammar=HOSTILE))
    gate.add(request)
    with pytest.raises(ValueError, match="already in use"):
        gate.add(request)
    assert gate.abort("a", FinishReason.ABORT)
    assert not gate.abort("a", FinishReason.ABORT)
    started: list[Any] = []
    outputs = gate.turn(False, lambda *given: started.append(given))
    assert [(output.id, output.finish_reason) for output in outputs] == [("a", FinishReason.ABORT)]
    assert not started
    assert not gate.waiting


def test_answers_of_several_requests_of_a_grammar_are_told_apart(pool: GrammarPool):
    process = compiled(pool, Grammar("regex", "a[0-9]|b[x-z]"))
    line = GrammarLine(process, (EOS,), ())
    first, second = Matcher(line, 0, ()), Matcher(line, 1, (ord("b"),))
    late = Matcher(line, 2, ())
    first.advance(ord("a"))  # before its first answer was read, as for a request that was taken back
    allowed = second.allowed(VOCABULARY)
    assert allowed is not None
    assert set(allowed.nonzero().flatten().tolist()) == set(b"xyz")
    allowed = late.allowed(VOCABULARY)
    assert allowed is not None
    assert set(allowed.nonzero().flatten().tolist()) >= set(b"ab")
    replaced = Matcher(line, 1, (ord("a"), ord("7"), EOS))
    assert replaced.allowed(VOCABULARY) is None, "after the end, anything"
    replaced.advance(5)
    assert replaced.allowed(VOCABULARY) is None
    assert len(process.early) <= 1


def test_between_reasoning_and_answer_is_white_space_of_json_alone(pool: GrammarPool):
    """Not the byte order mark and its like, which no JSON parser takes."""
    reading = Reading(AnswerFormats("hermes", "think"), opened=True)
    process = compiled(pool, behind_reasoning(Grammar.choice(["Rome"]), reading, "response_format"))
    allowed = Matcher(GrammarLine(process, (EOS,), ()), 0, tuple(b"x</think>")).allowed(VOCABULARY)
    assert allowed is not None
    assert set(allowed.nonzero().flatten().tolist()) == set(b"\t\n\r R")
