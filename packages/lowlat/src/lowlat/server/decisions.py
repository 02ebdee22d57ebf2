"""`POST /v1/decisions`: questions about one input, each answered by a choice, a level or yes or no."""

from __future__ import annotations

import string
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType

from lowlat.server.errors import bad_field
from lowlat.server.questions import label_ids, prompt_ids, shared_input, shares_and_mass
from lowlat.server.requests import no_op
from lowlat.server.responses import AnswerResponse
from lowlat.server.routes import state_of
from lowlat.server.score import heading, scoring_request, submit_score
from lowlat.server.score_requests import ScoreFields, ScoringAnswer

router = APIRouter()

Text = Annotated[str, Meta(min_length=1, max_length=65536)]


class QuestionFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    question: Text
    id: Annotated[str, Meta(max_length=256)] | None = None
    """Repeated in the answer."""


class ChoiceQuestion(QuestionFields, kw_only=True, tag="choice"):
    """One of 2 to 26 options, which the model sees as A, B, C..."""

    options: Annotated[list[Text], Meta(min_length=2, max_length=26)]


class ScoreQuestion(QuestionFields, kw_only=True, tag="score"):
    """One of 2 to 10 levels, which the model sees as 0, 1, 2..."""

    levels: Annotated[int, Meta(ge=2, le=10)] | Annotated[list[Text], Meta(min_length=2, max_length=10)]
    """How many there are, or what each means, the lowest first."""


class YesNoQuestion(QuestionFields, kw_only=True, tag="yes_no"):
    """Yes or no."""


Question = ChoiceQuestion | ScoreQuestion | YesNoQuestion


class DecisionRequest(ScoreFields, kw_only=True):
    """Body of `POST /v1/decisions`."""

    input: Annotated[str, Meta(min_length=1)]
    questions: list[Question]
    images: Annotated[Any, no_op([])] = None


class Decision(msgspec.Struct, kw_only=True):
    """The answer to one question."""

    type: str
    id: str | UnsetType = UNSET
    labels: list[str]
    """What stood for each answer: A to Z, 0 to 9, or Yes and No."""
    probabilities: list[float]
    """Shares among the labels, in their order."""
    label_mass: float
    """Probability of all labels together: far below 1, the model had something else to say."""
    choice: str | UnsetType = UNSET
    """The most likely label; of `yes_no`: `yes` or `no`."""
    score: float | UnsetType = UNSET
    """The mean level, by probability; of `score` only."""


class DecisionAnswer(ScoringAnswer, kw_only=True):
    """Answer of `POST /v1/decisions`; answers are in the order of the questions."""

    object: str = "decisions"
    answers: list[Decision]


@router.post("/v1/decisions", operation_id="decide", summary="Choices, levels and yes or no about one input")
async def decide(request: Request) -> Response:
    arrival = time.monotonic()
    body, model = await scoring_request(request, DecisionRequest)
    state = state_of(request)
    if len(body.questions) > state.settings.max_score_items:
        raise bad_field("questions", f"at most {state.settings.max_score_items} questions, got {len(body.questions)}")
    prompts = [await prompt_ids(model, body.input, worded(question)) for question in body.questions]
    labels = [
        label_ids(model, labels_of(question), f"questions[{number}]") for number, question in enumerate(body.questions)
    ]
    asked = shared_input(prompts, labels, "questions", model.engine.max_context)
    run = submit_score(request, body, asked, model, arrival)

    async def answer() -> AsyncIterator[bytes]:
        readings = await run.run()
        yield msgspec.json.encode(
            DecisionAnswer(
                **heading("decisions", run, model),
                answers=[
                    decision(question, places[0]) for question, places in zip(body.questions, readings, strict=True)
                ],
            )
        )

    return AnswerResponse(run, answer(), state.release, streamed=False)


def labels_of(question: Question) -> list[str]:
    """What stands for each answer."""
    if isinstance(question, ChoiceQuestion):
        return list(string.ascii_uppercase[: len(question.options)])
    if isinstance(question, ScoreQuestion):
        count = question.levels if isinstance(question.levels, int) else len(question.levels)
        return list(string.digits[:count])
    return ["Yes", "No"]


def worded(question: Question) -> str:
    """The question as the model reads it."""
    labels = labels_of(question)
    if isinstance(question, YesNoQuestion):
        return f'{question.question}\nAnswer with "Yes" or "No" only.'
    if isinstance(question, ScoreQuestion) and isinstance(question.levels, int):
        return f"{question.question}\nAnswer with one digit from 0 (lowest) to {labels[-1]} (highest) only."
    texts = question.options if isinstance(question, ChoiceQuestion) else question.levels
    assert isinstance(texts, list)
    lines = "\n".join(f"{label}. {text}" for label, text in zip(labels, texts, strict=True))
    kind = "letter of the right option" if isinstance(question, ChoiceQuestion) else "number of the right level"
    return f"{question.question}\n{lines}\nAnswer with the {kind} only."


def decision(question: Question, logprobs: list[float]) -> Decision:
    """The answer, from the log-probabilities of its labels."""
    labels = labels_of(question)
    shares, mass = shares_and_mass(logprobs)
    likeliest = labels[max(range(len(labels)), key=shares.__getitem__)]
    found = Decision(
        type=type(question).__struct_config__.tag,  # type: ignore[arg-type]
        id=UNSET if question.id is None else question.id,
        labels=labels,
        probabilities=shares,
        label_mass=mass,
    )
    if isinstance(question, ScoreQuestion):
        found.score = sum(level * share for level, share in enumerate(shares))
    else:
        found.choice = likeliest.lower() if isinstance(question, YesNoQuestion) else likeliest
    return found
