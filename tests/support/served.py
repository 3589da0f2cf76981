"""Lines of /metrics as real servers write them, SGLang 0.5.23 and vLLM 0.32.0: names and labels are theirs."""

from __future__ import annotations

SGLANG = """\
sglang:num_requests_total{engine_type="unified",is_streaming="true",model_name="tiny"} 162.0
sglang:time_to_first_token_seconds_sum{engine_type="unified",is_streaming="true",model_name="tiny"} 16.091724354000235
sglang:time_to_first_token_seconds_count{engine_type="unified",is_streaming="true",model_name="tiny"} 160.0
sglang:time_to_first_token_seconds_bucket{engine_type="unified",is_streaming="true",le="0.1",model_name="tiny"} 80.0
sglang:time_to_first_token_seconds_bucket{engine_type="unified",is_streaming="true",le="0.2",model_name="tiny"} 160.0
sglang:time_to_first_token_seconds_bucket{engine_type="unified",is_streaming="true",le="+Inf",model_name="tiny"} 160.0
sglang:time_to_first_token_seconds_bucket{engine_type="unified",is_streaming="false",le="0.1",model_name="tiny"} 0.0
sglang:time_to_first_token_seconds_bucket{engine_type="unified",is_streaming="false",le="0.2",model_name="tiny"} 0.0
sglang:time_to_first_token_seconds_bucket{engine_type="unified",is_streaming="false",le="+Inf",model_name="tiny"} 2.0
sglang:e2e_request_latency_seconds_sum{is_streaming="true",model_name="tiny"} 81.0
sglang:e2e_request_latency_seconds_count{is_streaming="true",model_name="tiny"} 162.0
sglang:prompt_tokens_histogram_sum{engine_type="unified",model_name="tiny"} 97021.0
sglang:prompt_tokens_histogram_bucket{engine_type="unified",le="100.0",model_name="tiny"} 60.0
sglang:prompt_tokens_histogram_count{engine_type="unified",model_name="tiny"} 162.0
sglang:uncached_prompt_tokens_histogram_sum{engine_type="unified",model_name="tiny"} 76029.0
sglang:uncached_prompt_tokens_histogram_count{engine_type="unified",model_name="tiny"} 162.0
sglang:inter_token_latency_seconds_sum{engine_type="unified",model_name="tiny"} 39.899719586999595
sglang:inter_token_latency_seconds_count{engine_type="unified",model_name="tiny"} 1725.0
sglang:per_stage_req_latency_seconds_sum{engine_type="unified",stage="request_process",tp_rank="0"} 0.01084740400017381
sglang:per_stage_req_latency_seconds_count{engine_type="unified",stage="request_process",tp_rank="0"} 163.0
sglang:per_stage_req_latency_seconds_sum{engine_type="unified",stage="prefill_forward",tp_rank="0"} 12.864806686999032
sglang:per_stage_req_latency_seconds_count{engine_type="unified",stage="prefill_forward",tp_rank="0"} 163.0
"""
VLLM = """\
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="tiny"} 40.0
vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"} 80.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="tiny"} 8.0
vllm:request_prefill_time_seconds_count{engine="0",model_name="tiny"} 80.0
vllm:request_prefill_time_seconds_created{engine="0",model_name="tiny"} 1.7e+09
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="tiny"} 40000.0
vllm:request_prefill_kv_computed_tokens_count{engine="0",model_name="tiny"} 80.0
vllm:request_prompt_tokens_sum{engine="0",model_name="tiny"} 64000.0
vllm:request_prompt_tokens_count{engine="0",model_name="tiny"} 80.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="tiny"} 20.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"} 1000.0
"""
