"""How a step's tokens extend an answer, and where they end it."""

from __future__ import annotations

from lowlat.engine.active import ActiveRequest
from lowlat.engine.executor import StepResult
from lowlat.engine.request import FinishReason, RequestOutput


def extend_answer(active: ActiveRequest, result: StepResult, sample: int, first: int, end: int) -> RequestOutput:
    """Take in a sample of a step, its tokens from number `first` to `end`; what follows the answer's end is dropped."""
    output = RequestOutput(active.request.id, [], None, cached_tokens=active.cached_tokens, queue_s=active.queue_s)
    known, new = active.tokens, output.token_ids
    for token in result.tokens[first:end]:
        known.append(token)
        new.append(token)
        if token in active.stops:
            output.finish_reason, output.stop_token_id = FinishReason.STOP, token
            break
        if len(known) >= active.end:
            output.finish_reason = FinishReason.LENGTH
            break
    if result.over and output.finish_reason is None and sample in result.over:
        output.error = result.over[sample]
        output.finish_reason = FinishReason.STOP if output.error is None else FinishReason.ERROR
    # The last token was never an input; those before it were, each at its own row.
    active.filled = len(known) - 1
    active.launched_samples = len(known) - active.prompt_tokens + active.in_flight
    if result.logprobs and active.request.sampling.logprobs is not None:
        entries = result.logprobs[first : first + len(new)]
        output.logprobs = [entry for entry in entries if entry is not None]
    return output
