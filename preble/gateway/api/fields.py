"""Fields of request bodies: their types and ranges, and those that engines know and this gateway does not do. Owns what
becomes of each of the latter: it is accepted because it cannot change an answer (`IGNORED`), or refused by name unless
it is null or has one of the values that ask for nothing. A field that is in no body's list is refused, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...transport.messages import STOP_TOKENS_MAX
from ...types import (
    ALLOWED_TOKENS_MAX,
    BAD_WORD_CHARS_MAX,
    BAD_WORDS_MAX,
    GRAMMAR_BYTES_MAX,
    LOGIT_BIAS_MAX,
    LOGPROBS_MAX,
)

INT31 = 2**31 - 1

TokenId = Annotated[int, Meta(ge=0, le=INT31)]
Count = Annotated[int, Meta(ge=1, le=INT31)]
Whole = Annotated[int, Meta(ge=0, le=INT31)]
Choices = Annotated[int, Meta(ge=1, le=1024)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=INT31)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=2)]
LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=LOGIT_BIAS_MAX),
]
Alternatives = Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Meta(max_length=16)]
AllowedIds = Annotated[list[TokenId], Meta(max_length=ALLOWED_TOKENS_MAX)]
BadWords = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=BAD_WORD_CHARS_MAX)]], Meta(max_length=BAD_WORDS_MAX)
]
StopIds = Annotated[list[TokenId], Meta(max_length=STOP_TOKENS_MAX)]
Salt = Annotated[str, Meta(max_length=256)]
GrammarText = Annotated[str, Meta(max_length=GRAMMAR_BYTES_MAX)]
GrammarChoice = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]

ABSENT = msgspec.Raw()
NOTHING: Any = msgspec.field(default_factory=lambda: ABSENT)
NEUTRAL_BYTES_MAX = 256  # of what asks for nothing
IGNORED = None  # in place of those values
Others = Mapping[str, tuple[Any, ...] | None]


def is_given(raw: msgspec.Raw) -> bool:
    """Whether a field is there and is not null."""
    return bytes(memoryview(raw)[:5]) not in (b"", b"null")


def is_one_of(raw: msgspec.Raw, values: tuple[Any, ...]) -> bool:
    """Whether a small value is one of these, 0 and False being two; large ones ask for something."""
    try:
        if memoryview(raw).nbytes > NEUTRAL_BYTES_MAX:
            return False
        found = msgspec.json.decode(raw)
    except msgspec.DecodeError:  # a number out of range: JSON was only looked over so far
        return False
    return any(found == value and isinstance(found, bool) == isinstance(value, bool) for value in values)


# How to choose tokens, in OpenAI's bodies and in SGLang's `sampling_params`.
SAMPLING: Others = {
    **dict.fromkeys(("stream_interval",), IGNORED),
    "beam_width": (1,),
    "custom_params": (),
    "spaces_between_special_tokens": (True,),
    "stop_regex": ([], {}, ""),
    "watermark": (),
}
# Of OpenAI's bodies, as engines extend them, and of SGLang's own alike.
ENGINES: Others = {
    "bootstrap_host": (),
    "bootstrap_pair_key": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "custom_logit_processor": (),
    "data_parallel_rank": (),
    "decode_tp_size": (),
    "disagg_prefill_dp_rank": (),
    "images_config": (),
    "lora_path": (),
    "mm_processor_kwargs": (),
    "priority": (0,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_dp_rank": (),
    "routed_experts_start_len": (0,),
    "session_params": (),
}
# Of both OpenAI's bodies, as OpenAI, vLLM and SGLang have them.
OPENAI: Others = {
    **SAMPLING,
    **ENGINES,
    **dict.fromkeys(
        (
            "custom_labels",
            "metadata",
            "mm_payload",
            "prompt_cache_retention",
            "request_id",
            "return_mm_kwargs",
            "rid",
            "safety_identifier",
            "service_tier",
            "session_id",
            "store",
        ),
        IGNORED,
    ),
    "ec_transfer_params": (),
    "kv_transfer_params": (),
    "length_penalty": (1,),
    "logprob_token_ids": ([], {}, ""),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "return_cached_tokens_details": (False,),
    "return_spec_tokens_details": (False,),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_tokens_as_token_ids": (False,),
    "routed_experts_prompt_start": (0,),
    "thinking_token_budget": (-1,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": ([], {}, ""),
    "watermarking": (),
}
# Of completions alone.
COMPLETIONS: Others = {
    **OPENAI,
    "add_special_tokens": (True,),
    "best_of": (1,),
    "prompt_embeds": (),
    "suffix": ("",),
}
# Of chats alone.
CHAT: Others = {
    **OPENAI,
    **dict.fromkeys(("return_flat_raw_top_logprobs_b64", "separate_reasoning", "stream_reasoning"), IGNORED),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "echo": (False,),
    "function_call": (
        "none",
        "auto",
    ),
    "functions": ([], {}, ""),
    "include_reasoning": (True,),
    "input_ids": (),
    "max_dynamic_patch": (),
    "media_io_kwargs": ([], {}, ""),
    "min_dynamic_patch": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning": (),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_meta_info": (False,),
    "return_output_ids_in_sglext": (False,),
    "return_prompt_text": (False,),
    "return_prompt_token_ids": (False,),
    "return_sampling_mask": (False,),
    "sampling_logprobs_mode": (),
    "task": (),
    "thinking": (),
    "use_audio_in_video": (False,),
    "verbosity": (),
    "video_config": (),
    "web_search_options": (),
}
# Of SGLang's /generate.
GENERATE: Others = {
    **ENGINES,
    **dict.fromkeys(
        ("conversation_id", "custom_labels", "log_metrics", "no_logs", "received_time", "routing_key", "session_id"),
        IGNORED,
    ),
    "audio_data": ([], {}, ""),
    "background": (False,),
    "encoder_urls": ([], {}, ""),
    "external_trace_header": (),
    "http_worker_ipc": (),
    "image_data": ([], {}, ""),
    "image_max_dynamic_patch": (),
    "input_embeds": (),
    "kv_hints": (),
    "lora_id": (),
    "max_dynamic_patch": (),
    "max_thinking_tokens": (),
    "min_dynamic_patch": (),
    "mm_content_hashes": ([], {}, ""),
    "mm_hashes": ([], {}, ""),
    "logprob_start_len": (-1,),
    "modalities": ([], {}, ""),
    "multi_item_delimiter_indices": (),
    "need_wait_for_mm_inputs": (False,),
    "num_items_assigned": (),
    "positional_embed_overrides": (),
    "require_reasoning": (False,),
    "return_bytes": (False,),
    "return_entropy": (False,),
    "return_flat_raw_output_top_logprobs": (False,),
    "return_flat_raw_top_logprobs": (False,),
    "return_flat_raw_top_logprobs_b64": (False,),
    "return_indexer_topk": (False,),
    "return_prompt_token_ids": (False,),
    "return_sampling_mask": (False,),
    "sampling_logprobs_mode": (),
    "token_ids_logprob": ([], {}, ""),
    "token_indices_to_pool": (),
    "use_audio_in_video": (False,),
    "video_config": (),
    "video_data": ([], {}, ""),
    "video_max_dynamic_patch": (),
    "watermark": (),
}
