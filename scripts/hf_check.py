"""Our logits beside transformers': what `convert_hf.py --check-logits` does.

Both models are whole in memory, one after the other. `check_logits`, then what it is made of.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from core.checkpoint.pieces import shard_pieces
from core.checkpoint.reader import Checkpoint
from core.process_grid import ProcessGrid
from core.shard import shard_of
from models.config import BertConfig, GPTConfig
from scripts.hf_layout import Unsupported

TEXT = "The quick brown fox jumps over the lazy dog, and def main(argv): return len(argv) - 1\n"
LIMIT = 1e-5  # of the largest logit, or of 1

Named = dict[str, Tensor]  # logits of a head


def check_logits(checkpoint: Checkpoint, config: GPTConfig | BertConfig, folder: Path) -> int:
    """Prints how far our logits are from transformers'; 1 when that is too far."""
    try:
        import transformers
    except ImportError:
        raise Unsupported("--check-logits needs the transformers package") from None
    tokens = sample_tokens(folder, config)
    is_bert = isinstance(config, BertConfig)
    kind = transformers.AutoModelForCausalLM
    if is_bert:
        pairs = config.binary_head
        kind = transformers.BertForPreTraining if pairs else transformers.BertForMaskedLM
    theirs = kind.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = their_bert(theirs, tokens) if is_bert else {"": theirs(tokens).logits}
        del theirs
        ours = (our_bert if is_bert else our_logits)(checkpoint, config, tokens)
    verdicts = [compare(name, ours[name], wanted[name]) for name in wanted]
    return 0 if all(verdicts) else 1


def compare(head: str, ours: Tensor, wanted: Tensor) -> bool:
    gap, allowed = float((ours - wanted).abs().max()), LIMIT * max(1.0, float(wanted.abs().max()))
    verdict = "equal" if gap <= allowed else "NOT EQUAL"
    head = head and f" of the {head} head"
    print(f"logits{head} of {wanted.shape[1]} tokens: {verdict}, largest difference {gap:.2g}")
    return gap <= allowed


def sample_tokens(folder: Path, config: GPTConfig | BertConfig) -> Tensor:
    """[1, s]: real text where there is a tokenizer, else the ids in a shuffled order."""
    longest = min(64, config.max_positions)
    if (folder / "tokenizer.json").is_file():
        from data.tokenizer import build_tokenizer

        tokenizer = build_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folder))
        ids = [i for i in tokenizer.encode(TEXT) if i < config.vocab_size]
        return torch.tensor([ids[:longest]])
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (1, longest), generator=generator)


def filled_stage(build_stages, checkpoint: Checkpoint, config, tokens: Tensor):
    """The whole model as one stage for texts as long as these, for evaluation."""
    config = replace(
        config, seq_length=tokens.shape[1], max_position_embeddings=config.max_positions, fp64=False
    )
    (stage,) = build_stages(
        config, ProcessGrid.single(), micro_batch_size=1, sequence_parallel=False, seed=0
    )
    for name, parameter in stage.named_parameters():
        checkpoint.fill(shard_pieces(f"model/{name}", parameter, shard_of(parameter), 0, 1))
    return stage.eval()


def our_logits(checkpoint: Checkpoint, config: GPTConfig, tokens: Tensor) -> Named:
    """tokens [1, s] -> [1, s, v] in float32."""
    from models.gpt import build_stages

    stage = filled_stage(build_stages, checkpoint, config, tokens)
    positions = torch.arange(tokens.shape[1]).expand(1, -1)
    batch = {"tokens": tokens, "position_ids": positions, "sample": torch.zeros(1, dtype=int)}
    logits = stage.logits(stage.hidden(batch, None))
    return {"": logits.transpose(0, 1)[..., : config.vocab_size]}


# ---- BERT: the second half of the tokens is another text, the last three are padding -------------


def token_types(tokens: Tensor) -> Tensor:
    return (torch.arange(tokens.shape[1]) >= tokens.shape[1] // 2).long().expand(1, -1)


def not_padding(tokens: Tensor) -> Tensor:
    return (torch.arange(tokens.shape[1]) < tokens.shape[1] - 3).long().expand(1, -1)


def their_bert(model, tokens: Tensor) -> Named:
    found = model(
        tokens, token_type_ids=token_types(tokens), attention_mask=not_padding(tokens)
    )
    if not hasattr(found, "prediction_logits"):
        return {"language": found.logits}
    return {"language": found.prediction_logits, "pair": found.seq_relationship_logits[:, None]}


def our_bert(checkpoint: Checkpoint, config: BertConfig, tokens: Tensor) -> Named:
    """tokens [1, s] -> [1, s, v], and [1, 1, 2] of the pair."""
    from models.bert import build_stages

    stage = filled_stage(build_stages, checkpoint, config, tokens)
    batch = {
        "tokens": tokens,
        "token_types": token_types(tokens),
        "padding_mask": not_padding(tokens),
        "sample": torch.zeros(1, dtype=int),
    }
    hidden = stage.hidden(batch, None)  # [s, 1, h]
    logits = stage.logits(stage.language_head(hidden[:, 0]))[None, :, : config.vocab_size]
    if stage.binary_head is None:
        return {"language": logits}
    return {"language": logits, "pair": stage.binary_head(hidden[0])[:, None]}
