"""The limits of a request, and the defaults of what it leaves out."""

from pydantic import BaseModel, ConfigDict, Field


class InputLimits(BaseModel):
    """Bounds on one request, so that none can take an ingress or an engine down."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    default_max_tokens: int = Field(
        1024, ge=1, description="max_tokens of a request that has none, where the context has room for so many."
    )
    max_prompt_chars: int = Field(
        4_000_000, ge=1, description="Characters of a prompt; longer ones are refused before they are tokenized."
    )
    max_prompt_embeds_bytes: int = Field(
        12 * 2**20, ge=0, le=48 * 2**20, description="Bytes of a prompt's embeddings; see also max_message_bytes."
    )
    max_chat_messages: int = Field(10_000, ge=1, description="Messages of a conversation, or parts of them.")
    max_samples: int = Field(32, ge=1, description="Samples of one prompt: n, or best_of.")
    max_samples_per_call: int = Field(
        256, ge=1, description="Samples of all prompts of one call: prompts times n, or best_of."
    )
    max_stop_strings: int = Field(16, ge=0, description="Stop strings of a request.")
    max_stop_string_chars: int = Field(256, ge=1, description="Characters of a stop string.")
    max_stop_token_ids: int = Field(64, ge=0, description="Stop tokens of a request.")
    max_logprobs: int = Field(20, ge=0, description="Log-probabilities returned per token.")
    max_prompt_logprobs: int = Field(
        500_000,
        ge=0,
        description="Log-probabilities returned for a prompt in all: prompt_logprobs + 1 for each of its tokens.",
    )
    max_logit_bias: int = Field(1024, ge=0, description="Entries of logit_bias.")
    max_allowed_token_ids: int = Field(16_384, ge=0, description="Tokens of allowed_token_ids.")
    max_bad_words: int = Field(256, ge=0, description="Words that the output must not have.")
    max_bad_word_chars: int = Field(256, ge=1, description="Characters of a bad word.")
    max_request_id_chars: int = Field(128, ge=1, description="Characters of a request id.")
    max_cache_salt_bytes: int = Field(256, ge=1, description="Bytes of cache_salt, as UTF-8.")
    max_inputs: int = Field(2048, ge=1, description="Inputs of a call for embeddings, classes or scores.")
    max_grammar_chars: int = Field(65_536, ge=1, description="Characters of a JSON schema, regex, grammar or choices.")
    max_choices: int = Field(1024, ge=1, description="Texts of which the output has to be one.")
    max_schema_depth: int = Field(32, ge=1, description="Schemas of a JSON schema that are inside each other.")
