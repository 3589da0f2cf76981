"""Prompts and arrivals to replay: readers, generators, arrival processes. Owns nothing itself."""

from .types import PromptRequest as PromptRequest
from .types import Workload as Workload
