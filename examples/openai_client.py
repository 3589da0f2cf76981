"""The official `openai` client in front of `preble serve`: streamed chats about two documents, and who answered.

Not part of Preble. Needs `pip install openai`. The gateway's address is the first argument, else http://127.0.0.1:8000.
"""

import sys

from openai import OpenAI

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
DOCUMENTS = {"ferry": "The ferry leaves at nine. " * 40, "crane": "The crane lifts ten tonnes. " * 40}

# The client tries again while the gateway is still starting.
client = OpenAI(base_url=f"{ADDRESS}/v1", api_key="unused", max_retries=20)
model = client.models.list().data[0].id
for question in ("Is it late?", "Is it heavy?"):
    for name, text in DOCUMENTS.items():
        answer = client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "system", "content": text}, {"role": "user", "content": question}],
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        print(f"{name}: {question} ", end="", flush=True)
        for event in answer.parse():
            if event.choices:
                print(repr(event.choices[0].delta.content or "")[1:-1], end="", flush=True)
            else:
                prompt, cached = event.usage.prompt_tokens, event.usage.prompt_tokens_details.cached_tokens
        print(f"\n  {answer.headers['x-preble-worker']}, {cached} of {prompt} prompt tokens cached", flush=True)
