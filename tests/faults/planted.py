"""One-line faults, each of a kind that another server had, and the tests that turn red when it is planted."""

from __future__ import annotations

import dataclasses

_LOWLAT = "packages/lowlat/src/lowlat/"


@dataclasses.dataclass(frozen=True)
class Plant:
    """`old` occurs once in `file`; `new` takes its place; then each of `tests` fails."""

    fault: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def _plant(fault: str, what: str, file: str, old: str, new: str, *tests: str) -> Plant:
    return Plant(fault, what, _LOWLAT + file, old, new, tuple(f"tests/{test}" for test in tests))


_ANSWERS = "faults/test_faults_answers.py::"
_SCHEDULE = "faults/test_faults_schedule.py::"

PLANTS = (
    _plant(
        "A01",
        "the part that was sent goes back by one character",
        "text/stops.py",
        "self._held = before[len(before) - keep :]",
        "self._held = before[len(before) - keep - 1 :]",
        f"{_ANSWERS}test_a01_what_was_sent_is_never_sent_again",
    ),
    _plant(
        "A02",
        "each token is decoded by itself",
        "text/detokenizer.py",
        "self._clean(self._decoder.decode(self._token_bytes(token_id)))",
        'self._clean(self._token_bytes(token_id).decode("utf-8", "replace"))',
        f"{_ANSWERS}test_a02_characters_stay_whole_in_streams_side_by_side",
    ),
    _plant(
        "A04",
        "text that may become a stop string is not held back",
        "text/stops.py",
        "keep = max(matcher.may_become() for matcher in self._matchers)",
        "keep = 0",
        f"{_ANSWERS}test_a04_a06_nothing_of_a_stop_string_leaks_and_all_ends_at_one_token",
    ),
    _plant(
        "A06",
        "ids behind the stop string stay in the answer",
        "text/output.py",
        'pieces.append(found.text)\n                return self._end("".join(pieces), list(token_ids[: n + 1])',
        'pieces.append(found.text)\n                return self._end("".join(pieces), list(token_ids)',
        f"{_ANSWERS}test_a04_a06_nothing_of_a_stop_string_leaks_and_all_ends_at_one_token",
        "text/test_text_output.py::test_a_burst_that_completes_a_stop_string_ends_there",
    ),
    _plant(
        "A08",
        "stop strings count before min_tokens",
        "text/output.py",
        "found = self._stops.push(text, may_stop=self._count > self._min_tokens)",
        "found = self._stops.push(text, may_stop=True)",
        f"{_ANSWERS}test_a08_nothing_ends_an_answer_before_min_tokens",
    ),
    _plant(
        "A10",
        "the first token of a burst alone has a log-probability",
        "engine/scheduler.py",
        "entries = result.logprobs[first : first + len(output.token_ids)]",
        "entries = result.logprobs[first : first + 1]",
        f"{_ANSWERS}test_a10_every_token_has_its_log_probability",
    ),
    _plant(
        "A11",
        "all tokens of a burst get the first one's alternatives",
        "text/output.py",
        "self._entry(token_id, logprobs[n])",
        "self._entry(token_id, logprobs[0])",
        f"{_ANSWERS}test_a11_streamed_arrays_equal_the_whole_ones",
    ),
    _plant(
        "A11",
        "offsets leave the echoed prompt out",
        "server/generation.py",
        "text_offset=len(self.prompt.text),",
        "text_offset=0,",
        f"{_ANSWERS}test_a11_streamed_arrays_equal_the_whole_ones",
    ),
    _plant(
        "A12",
        "a prompt that is to be scored takes its beginning from the cache",
        "engine/scheduler.py",
        "reuse = active.scored >= active.prompt_tokens - 1",
        "reuse = True",
        f"{_ANSWERS}test_a12_prompt_scores_are_whole_on_a_cache_hit",
    ),
    _plant(
        "A14",
        "log-probabilities go out as they are",
        "text/output.py",
        "return value if math.isfinite(value) and value > LOWEST_LOGPROB else LOWEST_LOGPROB",
        "return value",
        f"{_ANSWERS}test_a14_infinity_never_reaches_json",
    ),
    _plant(
        "A15",
        "a token is sampled although none was asked for",
        "engine/scheduler.py",
        "sample = end == active.prefill_end and sampling.max_tokens > 0",
        "sample = end == active.prefill_end",
        f"{_ANSWERS}test_a15_scoring_calls_hold_the_prompt_and_no_token_more",
    ),
    _plant(
        "A17",
        "a neighbour's seed is used",
        "engine/sampler.py",
        "likeliest[row], setting, position",
        'likeliest[row], __import__("msgspec").structs.replace(setting, seed=settings[-1].seed), position',
        "engine/test_engine_sampler.py::test_a_seed_decides_whatever_shares_the_batch",
    ),
    _plant(
        "A18",
        "all rows use the first row's seed",
        "engine/sampler.py",
        "likeliest[row], setting, position",
        'likeliest[row], __import__("msgspec").structs.replace(setting, seed=settings[0].seed), position',
        "engine/test_engine_sampler.py::test_a_seed_decides_whatever_shares_the_batch",
    ),
    _plant(
        "A20",
        "logits are divided by any temperature",
        "engine/sampler.py",
        "MIN_TEMPERATURE = 1e-5",
        "MIN_TEMPERATURE = 0.0",
        "engine/test_engine_sampler.py::test_tiny_temperatures_are_greedy",
    ),
    _plant(
        "A22",
        "penalties see each token once",
        "engine/logit_rules.py",
        "self._answer[token] += 1",
        "self._answer[token] = 1",
        "engine/test_engine_rules.py::test_rules_follow_their_definitions",
    ),
    _plant(
        "A22",
        "options hold for the first row of a speculative step alone",
        "engine/sampler.py",
        "position + len(burst), rule)",
        "position + len(burst), None if burst else rule)",
        "speculative/test_speculative_ngram.py::test_a_burst_is_what_single_rows_would_choose",
    ),
    _plant(
        "A26",
        "fields that are not supported are taken and ignored",
        "server/bodies.py",
        '_refuse_unsupported(body, "")',
        "pass",
        "server/test_server_refusals.py::test_a_bad_field_of_a_completion_is_named",
    ),
    _plant(
        "A30",
        "an answer leaves a choice out",
        "server/writers.py",
        "for index in sorted(answers)]",
        "for index in sorted(answers)[1:]]",
        f"{_ANSWERS}test_a30_every_choice_comes_once_with_one_ending",
    ),
    _plant(
        "A30",
        "leaving ends the first choice alone",
        "server/generation.py",
        "for choice in self.choices:\n            if choice.finish_reason is None:",
        "for choice in self.choices[:1]:\n            if choice.finish_reason is None:",
        "server/test_server_life.py::test_cancel_takes_the_id_of_an_answer_too_and_ends_all_choices",
    ),
    _plant(
        "A32",
        "an empty list of ids is a prompt",
        "server/requests.py",
        "TokenIds = Annotated[list[TokenId], Meta(min_length=1)]",
        "TokenIds = Annotated[list[TokenId], Meta(min_length=0)]",
        "server/test_server_refusals.py::test_a_bad_prompt_is_named",
    ),
    _plant(
        "A33",
        "the first id beyond the vocabulary passes",
        "server/plan.py",
        "if max(ids) >= vocab_size:",
        "if max(ids) > vocab_size:",
        "server/test_server_refusals.py::test_a_bad_prompt_is_named",
    ),
    _plant(
        "A34",
        "a live id is taken a second time",
        "server/state.py",
        "elif request_id in self.live:",
        "elif not request_id:",
        "server/test_server_life.py::test_a_live_id_is_refused_and_free_afterwards",
    ),
    _plant(
        "A36",
        "a prompt may fill the context",
        "server/plan.py",
        "if len(ids) + 1 > max_context:",
        "if len(ids) > max_context:",
        f"{_SCHEDULE}test_a36_lengths_at_the_edge_of_the_context",
    ),
    _plant(
        "A37",
        "a text that begins with BOS gets another",
        "text/tokenizer.py",
        "and ids[0] == ids[1] == self.bos_id:",
        "and ids[0] == ids[1] == -1:",
        "text/test_text_tokenizer.py::test_bos_is_added_once",
    ),
    _plant(
        "A38",
        "a lock begins at the parent of the matched node",
        "cache/radix.py",
        'once more."""\n        walk: Node | None = node\n',
        'once more."""\n        walk: Node | None = node.parent\n',
        "cache/test_cache_prefix.py::test_a_locked_prefix_outlives_eviction",
    ),
    _plant(
        "A40",
        "a hit may leave no token to compute",
        "cache/prefix.py",
        "reusable = (len(tokens) - 1) // self.page_size",
        "reusable = len(tokens) // self.page_size",
        "cache/test_cache_prefix.py::test_hits_are_whole_pages_and_leave_a_token",
    ),
    _plant(
        "A41",
        "the salt is left out of the key",
        "engine/scheduler.py",
        "active.request.cache_salt, reuse=reuse",
        '"", reuse=reuse',
        f"{_SCHEDULE}test_a41_salts_share_no_cache_entries",
    ),
    _plant(
        "A43",
        "pages are freed while a step in flight writes them",
        "engine/scheduler.py",
        "if active.in_flight:",
        "if False:",
        f"{_SCHEDULE}test_a43_an_abort_at_every_moment_frees_once",
        "engine/test_engine_order.py::test_an_end_noticed_late_frees_once_and_after_the_last_step",
    ),
    _plant(
        "A44",
        "a cancelled prompt is cached as far as it was asked for",
        "engine/active.py",
        "self.tokens[: min(self.filled, self.shareable)]",
        "self.tokens[: self.shareable]",
        f"{_SCHEDULE}test_a44_a_cancel_at_every_moment_of_a_shared_prefill_leaves_others_alone",
    ),
    _plant(
        "A45",
        "a request that has its row in this step is preempted",
        "engine/scheduler.py",
        "victim = self._running[-1]",
        "victim = self._running[0]",
        f"{_SCHEDULE}test_a45_priorities_preempt_and_everybody_ends_right",
    ),
    _plant(
        "A45",
        "a full running set makes a higher priority wait",
        "engine/scheduler.py",
        "if not self._slots:\n            return True",
        "if not self._slots:\n            return False",
        f"{_SCHEDULE}test_a45_equal_priorities_keep_their_order_when_the_running_set_is_full",
    ),
    _plant(
        "A47",
        "a padding row writes the last slot",
        "models/decoder.py",
        "real = step.real_rows\n",
        "real = step.real_rows; keys_SKD[-1] = rotated_RXD[-1, self.query_heads :]\n",
        "faults/test_faults_rows.py::test_a47_padding_rows_write_nothing_and_spoil_nothing",
    ),
    _plant(
        "A53",
        "a rank goes on with a token of its own",
        "engine/runner.py",
        "self._tokens[slot], self._lengths[slot] = token, length",
        "self._tokens[slot], self._lengths[slot] = 0, length",
        "engine/test_engine_ranks.py::test_two_and_four_ranks_answer_like_one",
    ),
    _plant(
        "A57",
        "health looks at the process alone",
        "engine/client.py",
        "alive = started and not silent and not stuck",
        "alive = started",
        "server/test_server_life.py::test_health_notices_a_hung_engine_idle_and_loaded",
    ),
    _plant(
        "A57",
        "steps are no sign of life",
        "engine/client.py",
        "if stats.step + self._earlier.step != self.stats.step or stats.running",
        "if stats.running",
        f"{_SCHEDULE}test_a57_a_long_prefill_that_moves_stays_healthy",
    ),
    _plant(
        "A58",
        "aborted requests are not counted",
        "server/metrics.py",
        "self.outcomes.update(generation.finish_reasons)",
        'self.outcomes.update(reason for reason in generation.finish_reasons if reason != "abort")',
        f"{_SCHEDULE}test_a58_gauges_and_counters_agree_after_all_clients_left",
    ),
    _plant(
        "A60",
        "a refusal of required kernels is swallowed",
        "engine/plugin_host.py",
        "raise KernelsRefusedError(str(refusal)) from refusal",
        "return",
        "plugin/test_plugin_engine.py::test_a_library_that_is_required_and_missing_stops_the_start",
    ),
)
