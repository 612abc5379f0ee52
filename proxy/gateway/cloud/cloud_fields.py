"""Lists the fields that a client's body may carry to a cloud model, per dialect and part.

They are those of the official APIs, less each that LiteLLM acts upon itself: where a request goes
and with which key (`api_base`, `headers`), what is billed and logged (`metadata`, tags, callbacks),
which files, stores, MCP servers and prompt templates of the user's account it reads. What is not
listed does not pass, so a field of a newer LiteLLM is shut out before anyone has heard of it.
"""

from collections.abc import Mapping
from typing import Final

Fields = frozenset[str]


def _fields(*names: str) -> Fields:
    return frozenset(name for text in names for name in text.split())


_OPENAI_SHARED: Final = (
    "model stream stream_options temperature top_p top_logprobs tools tool_choice store user "
    "parallel_tool_calls prompt_cache_key prompt_cache_retention prompt_cache_options "
    "safety_identifier service_tier"
)
_MESSAGES_COUNTED: Final = (
    "model messages system tools tool_choice thinking cache_control context_management "
    "output_config output_format speed"
)
_RESPONSES_COUNTED: Final = (
    "model input instructions tools tool_choice reasoning text truncation parallel_tool_calls "
    "previous_response_id"
)
BODY: Final[Mapping[str, Fields]] = {
    "chat": _fields(
        _OPENAI_SHARED,
        "messages audio frequency_penalty function_call functions logit_bias logprobs max_tokens "
        "max_completion_tokens modalities n prediction presence_penalty reasoning_effort seed stop "
        "response_format verbosity web_search_options",
    ),
    "completions": _fields(
        "model prompt stream stream_options temperature top_p best_of echo frequency_penalty "
        "logit_bias logprobs max_tokens n presence_penalty seed stop suffix user"
    ),
    "messages": _fields(
        _MESSAGES_COUNTED,
        "stream max_tokens metadata stop_sequences temperature top_p top_k service_tier "
        "inference_geo",
    ),
    "messages_count": _fields(_MESSAGES_COUNTED),
    "responses": _fields(
        _OPENAI_SHARED,
        _RESPONSES_COUNTED,
        "include max_output_tokens max_tool_calls context_management",
    ),
    "responses_count": _fields(_RESPONSES_COUNTED),
    "embeddings": _fields("model input dimensions encoding_format user"),
}

# vLLM's and SGLang's, which only they and servers like them take: others refuse, or go on of
# themselves. They say what the answer is, so they pass where a message is to be continued.
CONTINUING: Final = ("continue_final_message", "add_generation_prompt")
CONTINUERS: Final = frozenset({"openai", "hosted_vllm", "litellm_proxy"})

# ---------------------------------------------------------------- chat

CHAT_MESSAGE: Final = _fields(
    "role content name tool_calls tool_call_id refusal audio function_call cache_control",
    # What LiteLLM gives clients of a provider's opaque blocks, and takes back.
    "reasoning_content thinking_blocks reasoning_items provider_specific_fields",
)
_THOUGHT: Final = _fields("type thinking signature")
_REDACTED: Final = _fields("type data")
CHAT_PARTS: Final[Mapping[str, Fields]] = {
    "text": _fields("type text cache_control prompt_cache_breakpoint"),
    "refusal": _fields("type refusal"),
    "image_url": _fields("type image_url cache_control prompt_cache_breakpoint"),
    "input_audio": _fields("type input_audio prompt_cache_breakpoint"),
    "file": _fields("type file cache_control prompt_cache_breakpoint"),
    "thinking": _THOUGHT,
    "redacted_thinking": _REDACTED,
}
CHAT_CALL: Final = _fields("id type index function custom provider_specific_fields")
CALLED: Final = _fields("name arguments")
AUDIO: Final = _fields("id")
CHAT_OPAQUE: Final[Mapping[str, Mapping[str, Fields]]] = {
    "thinking_blocks": {"thinking": _THOUGHT, "redacted_thinking": _REDACTED},
    "reasoning_items": {"reasoning": _fields("type id summary content encrypted_content status")},
}
PROVIDER_BLOCKS: Final = _fields(  # of `provider_specific_fields`
    "thought_signature thought_signatures compaction_blocks web_search_results tool_results"
)
IMAGE_URL: Final = _fields("url detail")
FILE: Final = _fields("file_data filename")
FUNCTION: Final = _fields("name description parameters strict defer_loading cache_control")
CHAT_TOOLS: Final[Mapping[str, Fields]] = {
    "function": _fields("type function cache_control defer_loading allowed_callers"),
    "custom": _fields("type custom"),
}

# ---------------------------------------------------------------- Messages

MESSAGES_MESSAGE: Final = _fields("role content clear_at output_config")
_RESULT: Final = _fields("type tool_use_id content cache_control caller is_error")
MESSAGES_BLOCKS: Final[Mapping[str, Fields]] = {
    "text": _fields("type text cache_control citations"),
    "image": _fields("type source cache_control transformations"),
    "document": _fields("type source title context citations cache_control"),
    "search_result": _fields("type source title content citations cache_control"),
    "thinking": _THOUGHT,
    "redacted_thinking": _REDACTED,
    "tool_use": _fields("type id name input cache_control caller toolset_name"),
    "tool_result": _RESULT | {"toolset_name"},
    "tool_reference": _fields("type tool_name cache_control"),
    "server_tool_use": _fields("type id name input cache_control caller"),
    "web_search_tool_result": _RESULT,
    "web_fetch_tool_result": _RESULT,
    "code_execution_tool_result": _RESULT,
    "bash_code_execution_tool_result": _RESULT,
    "text_editor_code_execution_tool_result": _RESULT,
    "tool_search_tool_result": _RESULT,
    "compaction": _fields("type content encrypted_content signature cache_control tool_changes"),
    "tool_addition": _fields("type tool cache_control"),
    "tool_removal": _fields("type tool cache_control"),
}
MESSAGES_SOURCES: Final[Mapping[str, Fields]] = {
    "base64": _fields("type media_type data"),
    "text": _fields("type media_type data"),
    "content": _fields("type content"),
    "url": _fields("type url"),
}
MESSAGES_TOOL: Final = _fields(
    "type name description input_schema cache_control strict defer_loading allowed_callers "
    "eager_input_streaming input_examples max_characters max_uses allowed_domains blocked_domains "
    "user_location max_content_tokens citations use_cache response_inclusion display_width_px "
    "display_height_px display_number enable_zoom"
)
# The beginnings of the tools' types that Anthropic defines: `advisor` is none of them, which names
# another model, its address and its key, nor are MCP's.
MESSAGES_TOOL_TYPES: Final = (
    *("bash_", "text_editor_", "memory_", "computer_", "web_search_", "web_fetch_"),
    *("code_execution_", "tool_search_tool_"),
)

# ---------------------------------------------------------------- Responses

RESPONSES_PARTS: Final[Mapping[str, Fields]] = {
    "input_text": _fields("type text prompt_cache_breakpoint"),
    "output_text": _fields("type text annotations logprobs"),
    "text": _fields("type text"),
    "refusal": _fields("type refusal"),
    "input_image": _fields("type image_url detail prompt_cache_breakpoint"),
    "input_file": _fields("type file_data file_url filename detail prompt_cache_breakpoint"),
    "input_audio": _fields("type input_audio"),
    "computer_screenshot": _fields("type image_url detail"),
}
_CALL: Final = "type id call_id status caller name namespace"
RESPONSES_ITEMS: Final[Mapping[str, Fields]] = {
    "message": _fields("type id role content status phase"),
    "reasoning": _fields("type id summary content encrypted_content status"),
    "function_call": _fields(_CALL, "arguments"),
    "function_call_output": _fields(_CALL, "output"),
    "custom_tool_call": _fields(_CALL, "input"),
    "custom_tool_call_output": _fields(_CALL, "output"),
    "tool_search_call": _fields(_CALL, "arguments execution"),
    "tool_search_output": _fields(_CALL, "tools execution"),
    "additional_tools": _fields("type id role tools"),
    "computer_call": _fields(_CALL, "action actions pending_safety_checks"),
    "computer_call_output": _fields(_CALL, "output acknowledged_safety_checks"),
    "web_search_call": _fields("type id status action"),
    "image_generation_call": _fields("type id status result"),
    "code_interpreter_call": _fields("type id status code container_id outputs"),
    "local_shell_call": _fields(_CALL, "action"),
    "local_shell_call_output": _fields(_CALL, "output"),
    "shell_call": _fields(_CALL, "action environment"),
    "shell_call_output": _fields(_CALL, "output max_output_length"),
    "apply_patch_call": _fields(_CALL, "operation"),
    "apply_patch_call_output": _fields(_CALL, "output"),
    "compaction": _fields("type id encrypted_content"),
    "compaction_trigger": _fields("type"),
    "item_reference": _fields("type id"),
    "program": _fields("type id call_id code fingerprint"),
    "program_output": _fields("type id call_id result status"),
}
RESPONSES_TOOLS: Final[Mapping[str, Fields]] = {
    "function": _fields(
        "type name description parameters strict defer_loading allowed_callers output_schema"
    ),
    "custom": _fields("type name description format defer_loading allowed_callers"),
    "namespace": _fields("type name description tools"),
    "tool_search": _fields("type description execution parameters"),
    "web_search": _fields("type filters search_context_size user_location"),
    "web_search_preview": _fields("type search_content_types search_context_size user_location"),
    "computer": _fields("type"),
    "computer_use_preview": _fields("type display_height display_width environment"),
    "code_interpreter": _fields("type container allowed_callers"),
    "image_generation": _fields(  # without `model`
        "type action background input_fidelity moderation output_compression output_format "
        "partial_images quality size"
    ),
    "local_shell": _fields("type"),
    "apply_patch": _fields("type allowed_callers"),
    "programmatic_tool_calling": _fields("type"),
}
