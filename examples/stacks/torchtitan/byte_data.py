"""torchtitan's data components over Python's own sources: bytes are tokens, and no file is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer

from examples.corpus import Batches, read_corpus


class ByteTokenizer(BaseTokenizer):
    """A byte is a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Nothing to choose."""

    def __init__(self, config: Config, *, tokenizer_path: str = "") -> None:
        super().__init__()

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int], *args: Any, **kwargs: Any) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


class ByteLoader(BaseDataLoader):
    """Shares of one global batch, whatever the number of ranks; its state is a number, the same on all of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Windows of a micro-batch over all ranks; every number of ranks used must divide it."""

        windows: int = 6

    def __init__(self, config: Config, *, dp_rank: int, dp_world_size: int, seq_len: int, **_: Any) -> None:
        self._batches = Batches(read_corpus(1 << 20), batch_size=config.windows, seq_len=seq_len)
        self._place = (dp_rank, dp_world_size)
        self._next = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            inputs, targets = self._batches.of_rank(self._next, *self._place)
            self._next += 1
            yield {"input": inputs}, targets

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next = state_dict["next"]
