"""Makes tiny models with random weights, for servers of no use but to be compared. Run with the servers' own Python:

    python models.py FOLDER      # FOLDER/llama, FOLDER/gemma, FOLDER/other
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Makes those that are not there."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(3, 1024)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    common = {"vocab_size": 1024, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    common |= {"max_position_embeddings": 4096, "intermediate_size": 512, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}
    pattern = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    gemma = Gemma3TextConfig(**common, num_hidden_layers=6, sliding_window=256, layer_types=pattern, pad_token_id=0)
    kinds = {
        "llama": (LlamaForCausalLM, LlamaConfig(**common, num_hidden_layers=4, tie_word_embeddings=False)),
        "gemma": (Gemma3ForCausalLM, gemma),
        # Another model of the same shape.
        "other": (LlamaForCausalLM, LlamaConfig(**common, num_hidden_layers=4, tie_word_embeddings=False, rope_theta=5e5)),
    }
    for seed, (name, (kind, config)) in enumerate(kinds.items()):
        into = folder / name
        if (into / "config.json").exists():
            continue
        torch.manual_seed(seed)
        model = kind(config)
        with torch.no_grad():
            for weights in model.parameters():
                if weights.dim() == 2:
                    # Larger than usual, so that each token depends on those before it.
                    weights.normal_(0, 0.08)
        model.to(torch.bfloat16).save_pretrained(into)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
        ).save_pretrained(into)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
