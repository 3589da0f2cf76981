"""Prompts and arrivals to replay: readers, generators, arrival processes, tokenizers. Owns the public names only.

from preble import workloads
tools = workloads.read("tool_use.jsonl.gz", tokenizer=workloads.mistral())
hour = workloads.poisson(workloads.zipf(tools, 1.1, requests=10_000, seed=0), rps=4.0, seed=0)
"""

from .readers import read as read
from .tokenizers import Tokenizer as Tokenizer
from .tokenizers import mistral as mistral
from .tokenizers import words as words
from .types import PromptRequest as PromptRequest
from .types import Workload as Workload
