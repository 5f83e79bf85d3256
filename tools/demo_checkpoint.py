"""The demo model's tokenizer and shape, and how the two are written as a checkpoint."""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 4096
PAD, BOS, EOS = SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>")
PAD_ID, BOS_ID, EOS_ID = range(3)

# The model has read source text and nothing else, so a chat is source text too: what the system says is a comment,
# and what the user says is the beginning of the code that the assistant continues.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{{- '# ' + message['content'] | trim | replace('\\n', '\\n# ') -}}
{%- else -%}
{{- message['content'] -}}
{%- endif -%}
{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}
{%- endfor -%}
"""


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE: all 256 bytes are in its alphabet, so that any text survives the round trip."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", pair=None, special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def model_config() -> LlamaConfig:
    """Return the shape of the model: 4.5 million parameters, 9 MB in bfloat16."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint the way that transformers and every engine read it."""
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    model.save_pretrained(out)
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(out, save_jinja_files=False)
