"""What the examples on training stacks share: a tiny Llama of transformers, and data it can learn."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=67,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    bos_token_id=0,
    eos_token_id=1,
    use_cache=False,
)


def tiny_llama(seed: int = 0, *, tied: bool = False) -> LlamaForCausalLM:
    """The same 30,000 parameters on every rank; with ``tied`` the embeddings are one."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": tied}))


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Arithmetic modulo the vocabulary: each token follows from the one before it.

    Args:
        num_sequences: how many there are.
        length: tokens of each.
    """

    def __init__(self, num_sequences: int, length: int = 16) -> None:
        self._num_sequences = num_sequences
        self._length = length

    def __len__(self) -> int:
        return self._num_sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step = 1 + index % 5
        tokens = (torch.arange(self._length) * step + index * 7) % CONFIG.vocab_size
        return {"input_ids": tokens, "labels": tokens.clone()}
