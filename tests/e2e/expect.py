"""How many bytes a request must move: counted from the model's configuration, with nothing of kvx."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil
from pathlib import Path

SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Model:
    """What of a model its cache depends on."""

    #: Of each layer its window in tokens, or nothing.
    windows: tuple[int | None, ...]
    #: Bytes of one token in one layer, over all heads.
    token_bytes: int

    @staticmethod
    def read(folder: Path, dtype: str | None = None) -> Model:
        """From a Hugging Face `config.json`; `dtype` is what the servers compute in, where that is another."""
        config = json.loads((folder / "config.json").read_text())
        config = config.get("text_config", config)
        layers = config["num_hidden_layers"]
        kinds = config.get("layer_types") or ["full_attention"] * layers
        windows = tuple(config["sliding_window"] if kind == "sliding_attention" else None for kind in kinds)
        size = SIZES[dtype or config.get("dtype") or config["torch_dtype"]]
        return Model(windows, 2 * config["num_key_value_heads"] * config["head_dim"] * size)

    @property
    def window(self) -> int | None:
        """The smallest window."""
        return min((window for window in self.windows if window is not None), default=None)

    def transferred(self, prompt: int) -> int:
        """Of how many tokens the cache is handed over: where a layer has a window that the prompt fills, the decode server computes the last
        one without it."""
        return prompt - 1 if self.window is not None and prompt >= max(self.window, 2) else prompt

    def bytes(self, prompt: int, cached: int, blocks: tuple[int, int]) -> int:
        """Bytes that a request must move, of whose prompt the decode server has `cached` tokens; `blocks` are tokens in a block of the
        prefill and of the decode server."""
        tokens = self.transferred(prompt)
        total = 0
        for window in self.windows:
            first = 0 if window is None else max(0, tokens + 1 - window)
            if blocks[0] == blocks[1]:
                # Whole blocks.
                size = blocks[0]
                begin = max(first // size * size, cached)
                moved = ceil(tokens / size) * size - begin
            else:
                moved = tokens - max(first, cached)
            total += max(moved, 0) * self.token_bytes
        return total
