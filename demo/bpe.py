"""The demo model's tokenizer: a byte-level BPE learned from the training chapters alone."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0

# The model continues prose and knows no roles, so a conversation is simply its messages, one paragraph each.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}{% endfor %}"
)


def train_tokenizer(chapters: Sequence[str], vocabulary: int) -> Tokenizer:
    """Learn `vocabulary` byte-level tokens; every byte is one of them, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, longest: int) -> None:
    """Write the files `AutoTokenizer` reads, chat template included."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder, save_jinja_files=False)


def encode(tokenizer: Tokenizer, chapters: Sequence[str]) -> torch.Tensor:
    """All chapters as one row of token ids, an end-of-text token after each."""
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(chapters)):
        ids.extend(encoding.ids)
        ids.append(END_OF_TEXT_ID)
    return torch.tensor(ids, dtype=torch.long)
