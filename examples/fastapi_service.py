"""A FastAPI service with Preble inside: text comes in, tokens stream out; the router chooses a worker for each prompt.

preble worker --engine simulated --bind tcp://127.0.0.1:5601       and another one at 5603
PREBLE_WORKERS=tcp://127.0.0.1:5601,tcp://127.0.0.1:5603 uvicorn examples.fastapi_service:app
curl -N 127.0.0.1:8000/generate -H 'content-type: application/json' -d '{"prompt": "Which ferry leaves at nine?"}'
"""

import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

import preble
from preble.errors import CapacityExceeded, InvalidInput, NoWorkers, Overloaded, PrebleError


class Question(BaseModel):
    prompt: str = Field(min_length=1)
    max_new_tokens: int = Field(default=32, ge=1, le=4096)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
    workers = os.environ["PREBLE_WORKERS"].split(",")
    # Your model's tokenizer takes the place of this one, a token a byte; it is called in a thread.
    async with preble.Router(workers, tokenizer=lambda text: list(text.encode())) as app.state.router:
        yield


app = FastAPI(lifespan=lifespan)


@app.exception_handler(PrebleError)
async def refuse(request: Request, error: Exception) -> JSONResponse:
    status = 400 if isinstance(error, InvalidInput) else 503 if isinstance(error, CapacityExceeded | NoWorkers) else 502
    headers = {"retry-after": str(int(error.retry_after_seconds) + 1)} if isinstance(error, Overloaded) else {}
    return JSONResponse({"error": str(error)}, status, headers)


@app.post("/generate")
async def generate(question: Question, request: Request) -> StreamingResponse:
    router: preble.Router = request.app.state.router
    chunks = router.generate(question.prompt, preble.SamplingParams(max_new_tokens=question.max_new_tokens))
    first = await anext(chunks)  # so that a refusal has an HTTP status

    async def lines() -> AsyncGenerator[str, None]:
        async with aclosing(chunks):  # a client that hangs up ends its request at the worker
            yield line(first)
            async for chunk in chunks:
                yield line(chunk)

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def line(chunk: preble.StreamChunk) -> str:
    return json.dumps({"tokens": chunk.token_ids, "worker": chunk.worker, "ends": chunk.finish_reason}) + "\n"
