"""The limits on a single request, and the default of max_tokens."""

from pydantic import BaseModel, ConfigDict, Field


class InputLimits(BaseModel):
    """Limits on a single request, so that no request can overload an ingress or an engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    default_max_tokens: int = Field(
        1024,
        ge=1,
        description="max_tokens of a request that does not set it, unless the checkpoint's generation_config.json "
        "does; less if the context has less room.",
    )
    max_prompt_chars: int = Field(
        4_000_000, ge=1, description="Limit on a prompt in characters; longer ones are refused before tokenization."
    )
    max_prompt_embeds_bytes: int = Field(
        12 * 2**20,
        ge=0,
        le=48 * 2**20,
        description="Limit on the size of prompt embeddings in bytes; see also max_message_bytes.",
    )
    max_chat_messages: int = Field(
        10_000, ge=1, description="Limit on the messages of a conversation, and on the parts of its messages."
    )
    max_samples: int = Field(32, ge=1, description="Limit on the samples of one prompt (n or best_of).")
    max_samples_per_call: int = Field(
        256, ge=1, description="Limit on the samples of all prompts of a call: prompts times n, or times best_of."
    )
    max_stop_strings: int = Field(16, ge=0, description="Limit on the number of stop strings of a request.")
    max_stop_string_chars: int = Field(256, ge=1, description="Limit on the length of a stop string in characters.")
    max_stop_token_ids: int = Field(64, ge=0, description="Limit on the number of stop_token_ids.")
    max_logprobs: int = Field(20, ge=0, description="Limit on the log-probabilities per output token.")
    max_prompt_logprobs: int = Field(
        500_000,
        ge=0,
        description="Limit on the log-probabilities for a whole prompt: prompt_logprobs + 1 for each of its tokens.",
    )
    max_logit_bias: int = Field(1024, ge=0, description="Limit on the number of entries of logit_bias.")
    max_allowed_token_ids: int = Field(16_384, ge=0, description="Limit on the number of allowed_token_ids.")
    max_bad_words: int = Field(256, ge=0, description="Limit on the number of bad_words.")
    max_bad_word_chars: int = Field(256, ge=1, description="Limit on the length of a bad word in characters.")
    max_request_id_chars: int = Field(128, ge=1, description="Limit on the length of a request id in characters.")
    max_cache_salt_bytes: int = Field(256, ge=1, description="Limit on the length of cache_salt in bytes of UTF-8.")
    max_inputs: int = Field(
        2048, ge=1, description="Limit on the number of inputs of a call for embeddings, classes or scores."
    )
    max_grammar_chars: int = Field(
        65_536,
        ge=1,
        description="Limit on the length of a JSON schema, regular expression, grammar, or all choices, in characters.",
    )
    max_choices: int = Field(1024, ge=1, description="Limit on the number of choices for structured output.")
    max_schema_depth: int = Field(32, ge=1, description="Limit on the nesting depth of a JSON schema.")
