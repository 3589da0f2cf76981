"""Prompts and arrivals to replay: readers, generators, arrival processes, tokenizers. Owns the public names only.

from preble import workloads
tools = workloads.read("tool_use.jsonl.gz", tokenizer=workloads.mistral())
hour = workloads.poisson(workloads.zipf(tools, 1.1, requests=10_000, seed=0), rps=4.0, seed=0)
"""

from .agents import coding_agents as coding_agents
from .agents import read_sessions as read_sessions
from .agents import sample_groups as sample_groups
from .arrivals import arrival_times as arrival_times
from .arrivals import azure_times as azure_times
from .arrivals import closed_loop as closed_loop
from .arrivals import merged as merged
from .arrivals import poisson as poisson
from .arrivals import take as take
from .arrivals import traced as traced
from .arrivals import zipf as zipf
from .generators import generate as generate
from .readers import format_of as format_of
from .readers import read as read
from .sessions import session_arrivals as session_arrivals
from .sessions import sessions_at_once as sessions_at_once
from .tenants import Flood as Flood
from .tenants import read_tenant_rates as read_tenant_rates
from .tenants import tenant_arrivals as tenant_arrivals
from .tenants import tenant_rates as tenant_rates
from .tokenizers import Tokenizer as Tokenizer
from .tokenizers import from_file as from_file
from .tokenizers import mistral as mistral
from .tokenizers import words as words
from .types import PromptRequest as PromptRequest
from .types import Workload as Workload
