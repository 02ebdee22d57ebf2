"""`POST /v1/rerank`: documents in the order of their relevance to a query, as a causal model judges it.

For each document the model is asked whether it answers the query; the score is the share of yes among yes and no.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType

from lowlat.server.errors import bad_field
from lowlat.server.questions import label_ids, prompt_ids, shared_input, shares_and_mass
from lowlat.server.responses import AnswerResponse
from lowlat.server.routes import state_of
from lowlat.server.score import heading, scoring_request, submit_score
from lowlat.server.score_requests import ScoreFields, ScoringAnswer

router = APIRouter()

INSTRUCTION = "Judge whether the document helps to answer the query."


class Document(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class RerankRequest(ScoreFields, kw_only=True):
    """Body of `POST /v1/rerank`."""

    query: Annotated[str, Meta(min_length=1)]
    documents: list[str | Document]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    """Most results; absent: all."""
    return_documents: bool | None = None
    """Whether results repeat their document; default true."""
    instruction: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    """What relevance means here; the model reads it before the query."""


class RerankResult(msgspec.Struct, kw_only=True):
    index: int
    """Place of the document in the request."""
    relevance_score: float
    label_mass: float
    """Probability of yes and no together: far below 1, the model had something else to say."""
    document: Document | UnsetType = UNSET


class RerankAnswer(ScoringAnswer, kw_only=True):
    """Answer of `POST /v1/rerank`; the most relevant first."""

    object: str = "rerank"
    results: list[RerankResult]


@router.post("/v1/rerank", operation_id="rerank", summary="Documents by relevance to a query")
async def rerank(request: Request) -> Response:
    arrival = time.monotonic()
    body, model = await scoring_request(request, RerankRequest)
    state = state_of(request)
    if len(body.documents) > state.settings.max_score_items:
        raise bad_field("documents", f"at most {state.settings.max_score_items} documents, got {len(body.documents)}")
    texts = [document if isinstance(document, str) else document.text for document in body.documents]
    context = f"{body.instruction or INSTRUCTION}\n\nQuery: {body.query}"
    question = 'Is the document relevant to the query? Answer with "Yes" or "No" only.'
    prompts = [await prompt_ids(model, f"{context}\n\nDocument: {text}", question) for text in texts]
    labels = [label_ids(model, ("Yes", "No"), "model")]
    asked = shared_input(prompts, labels, "documents", model.engine.max_context)
    run = submit_score(request, body, asked, model, arrival)

    async def answer() -> AsyncIterator[bytes]:
        readings = await run.run()
        results = []
        for index, places in enumerate(readings):
            shares, mass = shares_and_mass(places[0])
            document = Document(texts[index]) if body.return_documents is not False else UNSET
            results.append(RerankResult(index=index, relevance_score=shares[0], label_mass=mass, document=document))
        results.sort(key=lambda result: (-result.relevance_score, result.index))
        yield msgspec.json.encode(
            RerankAnswer(
                **heading("rerank", run, model),
                results=results[: body.top_n],
            )
        )

    return AnswerResponse(run, answer(), state.release, streamed=False)
