"""Embedding in fifteen lines: choose a worker for each prompt, report how it went. Runs in the base install."""

import preble

scheduler = preble.GlobalScheduler(["worker-a", "worker-b"])
documents = {"manual": list(range(1000, 3000)), "novel": list(range(5000, 7000))}  # token ids of two shared documents

for question in range(4):
    for name, tokens in documents.items():
        decision = scheduler.schedule(tokens + [question] * 40)  # choose a worker and book the request on it
        # ... send the prompt to decision.worker and stream its answer ...
        scheduler.first_token(decision.request_id)  # the prefill is done
        scheduler.finish(decision.request_id, output_tokens=32)
        print(f"{name}: {decision.worker} ({decision.reason}, {decision.matched_tokens} of {decision.prompt_tokens})")
