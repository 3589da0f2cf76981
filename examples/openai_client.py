"""The official `openai` client in front of `preble serve`: streamed answers about two documents at a time.

Prints each answer, in how many pieces it came, which worker gave it, and how much of the prompt was cached there. Not
part of Preble. Needs `pip install openai`. The gateway's address is the first argument, else http://127.0.0.1:8000.
"""

import asyncio
import sys

from openai import AsyncOpenAI

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
DOCUMENTS = {"ferry": "The ferry leaves at nine. " * 80, "crane": "The crane lifts ten tonnes. " * 80}
QUESTIONS = ("Is it late?", "Is it heavy?")


async def main() -> None:
    # The client tries again while the gateway is still starting.
    async with AsyncOpenAI(base_url=f"{ADDRESS}/v1", api_key="unused", max_retries=20) as client:
        model = (await client.models.list()).data[0].id
        for question in QUESTIONS:
            await asyncio.gather(*(ask(client, model, name, question) for name in DOCUMENTS))


async def ask(client: AsyncOpenAI, model: str, name: str, question: str) -> None:
    answer = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=[{"role": "system", "content": DOCUMENTS[name]}, {"role": "user", "content": question}],
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces: list[str] = []
    prompt, cached = 0, 0
    async for event in answer.parse():
        if event.choices:
            pieces.append(event.choices[0].delta.content or "")
        elif event.usage is not None:  # the last event
            details = event.usage.prompt_tokens_details
            prompt, cached = event.usage.prompt_tokens, (details.cached_tokens or 0) if details else 0
    print(f"{name}: {question} {''.join(pieces)!r}")
    print(f"  {len(pieces)} pieces from {answer.headers['x-preble-worker']}, {cached} of {prompt} prompt tokens cached")


asyncio.run(main())
