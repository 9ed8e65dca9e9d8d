"""scripts/convert_hf.py from and to layouts: what tp 2 x pp 2 wrote, and where an import may train.

Reported for other frameworks: huggingface/transformers#12004, Lightning-AI/litgpt#1013 (a converted
model has other logits: padded vocabulary, order of heads); wished for in NVIDIA/Megatron-LM#1560.
"""

import pytest
import torch

from core.checkpoint.reader import open_checkpoint
from core.comm import Group
from scripts.convert_hf import main
from scripts.hf_folder import HFFolder
from tests.recipe import contents, rows, run_recipe
from tests.scripts.test_convert_hf import BERT, same, write_theirs

TP2 = ("--tensor-model-parallel-size", 2)
PP2 = ("--pipeline-model-parallel-size", 2)
SHAPE = ("--vocab-size", 51, "--attention-dropout", 0, "--hidden-dropout", 0)
LLAMA = """--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights""".split()
FAMILIES = {
    "gpt2": ("pretrain_gpt", (), "transformer.wte.weight"),
    "llama": ("pretrain_gpt", tuple(LLAMA), "lm_head.weight"),
    "bert": ("pretrain_bert", (), "bert.embeddings.word_embeddings.weight"),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_from_tp2_pp2_and_to_any(ranks, tmp_path, kind, capsys):
    """51 words, padded to 52 by the writers and to 54 elsewhere: the files have 51."""
    pytest.importorskip("transformers")
    script, flags, table = FAMILIES[kind]
    flags = (*SHAPE, *flags)
    saved = ("--train-iters", 3, "--save", tmp_path / "run")
    ranks.run(run_recipe, *flags, *TP2, *PP2, *saved, size=4, script=script)
    out, back = str(tmp_path / "hf"), str(tmp_path / "back")
    assert main(["export", str(tmp_path / "run"), out, "--check-logits"]) == 0
    assert main(["import", out, back, "--check-logits"]) == 0
    said = capsys.readouterr().out
    assert said.count("equal, largest difference") == (4 if kind == "bert" else 2)
    assert HFFolder(tmp_path / "hf").shape(table) == (51, 32)
    trained, imported = contents(tmp_path / "run"), contents(tmp_path / "back")
    weights = {name: value for name, value in trained.items() if name.startswith("model/")}
    assert same(weights, imported)
    losses = []
    for size, layout in ((1, ()), (2, TP2), (2, PP2)):
        metrics = tmp_path / "next.jsonl"
        metrics.unlink(missing_ok=True)
        how = (*flags, *layout, "--load", back, "--finetune", "--train-iters", 1)
        how += ("--metrics-file", metrics, "--make-vocab-size-divisible-by", 6)
        if size == 1:
            run_recipe(Group.single("world"), *how, script=script)
        else:
            ranks.run(run_recipe, *how, size=size, script=script)
        losses.append(rows(metrics)[0]["lm_loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_the_oldest_files_names(tmp_path):
    """bert-base-uncased as it was published: gamma and beta, decoder stored as well, a pooler
    beside a config that names the class without one."""

    def old(name):
        return name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")

    extra = {"cls.predictions.decoder.weight": torch.zeros(101, 24),
             "bert.embeddings.position_ids": torch.arange(32).view(1, -1)}  # fmt: skip
    theirs = write_theirs(tmp_path / "hf", BERT, old, extra)
    config = tmp_path / "hf" / "config.json"
    config.write_text(config.read_text().replace("{", '{"architectures": ["BertForMaskedLM"], ', 1))
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    ours = open_checkpoint(tmp_path / "ours")
    gain = ours.read("model/layers.1.attention_norm.weight")
    assert torch.equal(gain, theirs["bert.encoder.layer.1.attention.output.LayerNorm.gamma"])
    assert "model/binary_head.pooler.weight" in ours.names()
    assert ours.meta["model"]["bert_no_binary_head"] is False


def test_what_a_bert_cannot_be(tmp_path, capsys):
    write_theirs(tmp_path / "hf", BERT)
    config = tmp_path / "hf" / "config.json"
    wrong = '{"hidden_act": "gelu_new", "is_decoder": true, "type_vocab_size": 16, '
    config.write_text(config.read_text().replace("{", wrong, 1))
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 2
    said = capsys.readouterr().err
    for words in (
        "hidden_act gelu_new (only gelu is supported)",
        "is_decoder True (only False is supported)",
        "type_vocab_size 16 (only 2 is supported)",
    ):
        assert words in said
