"""scripts/convert_hf.py: both ways bit for bit, logits as transformers', refusals by name."""

import json
import os
import weakref

import pytest
import torch

from core.checkpoint.pieces import shard_pieces
from core.checkpoint.reader import open_checkpoint
from core.checkpoint.store import save
from core.comm import Group, all_gather
from core.grid import RankGrid
from core.process_grid import ProcessGrid
from core.shard import shard_of
from models.config import GPTConfig
from models.gpt import build_stages
from scripts import convert_hf, hf_folder
from scripts.convert_hf import main, model_config
from scripts.hf_check import check_logits
from scripts.hf_families import FAMILIES, family_for
from scripts.hf_layout import Unsupported, llama_rope
from tests.core.checkpoint.states import single

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 24, "n_head": 4, "n_positions": 32,
        "vocab_size": 101}  # fmt: skip
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 101,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-5}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
BERT = {"model_type": "bert", "num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 4,
        "intermediate_size": 40, "max_position_embeddings": 32, "vocab_size": 101,
        "layer_norm_eps": 1e-6}  # fmt: skip
MODELS = {
    "gpt2": GPT2,
    "gpt2, untied": GPT2 | {"tie_word_embeddings": False, "n_inner": 40},
    "llama": LLAMA,
    "llama 3.1": LLAMA | {"rope_scaling": LLAMA3, "rope_theta": 5e3, "head_dim": 16},
    "bert": BERT,
    "bert, one head": BERT | {"architectures": ["BertForMaskedLM"]},
    "llama, tied, biased": LLAMA
    | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    | {"num_key_value_heads": 4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}


def write_theirs(folder, config, names=lambda name: name, extra=()):
    """A folder as save_pretrained makes it, weights random; the config need not make sense."""
    family = FAMILIES[config["model_type"]]
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for rule in family.rules(family.config(config)):
        for name, shape in zip(rule.theirs, rule.their_shapes(), strict=True):
            tensors[names(name)] = torch.randn(shape, generator=generator) * 0.3
    tensors |= dict(extra)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    convert_hf.write_file(folder / "model.safetensors", list(tensors.items()), {"format": "pt"})
    return tensors


def read_theirs(folder):
    source = hf_folder.HFFolder(folder)
    return {name: source.read(name) for name in source.names()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back_bit_for_bit(tmp_path, kind, capsys):
    theirs = write_theirs(tmp_path / "hf", MODELS[kind])
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    assert "--load" in capsys.readouterr().out
    shards = ["--max-shard-size", "0.00001"]
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), *shards]) == 0
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 3
    assert same(theirs, read_theirs(tmp_path / "back"))
    assert main(["import", str(tmp_path / "back"), str(tmp_path / "again")]) == 0
    first, second = open_checkpoint(tmp_path / "ours"), open_checkpoint(tmp_path / "again")
    assert same(*({n: c.read(n) for n in c.names()} for c in (first, second)))
    assert first.meta["model"] == second.meta["model"]


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(tmp_path, kind, capsys):
    """Both ways: of what was imported, and of what transformers makes of our export."""
    pytest.importorskip("transformers")
    write_theirs(tmp_path / "hf", MODELS[kind])
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "ours"), "--check-logits"]) == 0
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "back"), "--check-logits"]) == 0
    heads = 2 if kind == "bert" else 1
    assert capsys.readouterr().out.count("equal, largest difference") == 2 * heads


def test_the_logits_check_bites(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    write_theirs(tmp_path / "hf", LLAMA)
    wrong = LLAMA | {"rms_norm_eps": 1e-3}
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    (tmp_path / "hf" / "config.json").write_text(json.dumps(wrong))
    checkpoint = open_checkpoint(tmp_path / "ours")
    assert check_logits(checkpoint, model_config(checkpoint), tmp_path / "hf") == 1


def logits_at_tp(world, directory, tokens):
    checkpoint = open_checkpoint(directory)
    config = model_config(checkpoint)
    grid = ProcessGrid.build(RankGrid(tp=world.size), world)
    (stage,) = build_stages(config, grid, micro_batch_size=1, sequence_parallel=False, seed=0)
    for name, p in stage.named_parameters():
        checkpoint.fill(shard_pieces(f"model/{name}", p, shard_of(p), grid.tp.rank, grid.tp.size))
    positions = torch.arange(tokens.shape[1]).expand(1, -1)
    batch = {"tokens": tokens, "position_ids": positions, "sample": torch.zeros(1, dtype=int)}
    with torch.no_grad():
        mine = stage.eval().logits(stage.hidden(batch, None))
    return all_gather(mine, grid.tp, dim=2, tag="logits")[..., : config.vocab_size]


@pytest.mark.parametrize("kind", ["gpt2", "llama 3.1"])
def test_an_import_loads_at_any_tp(ranks, tmp_path, kind):
    write_theirs(tmp_path / "hf", MODELS[kind])
    main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")])
    tokens = torch.arange(32).view(1, -1)
    (alone,) = ranks.run(logits_at_tp, tmp_path / "ours", tokens, size=1)
    for result in ranks.run(logits_at_tp, tmp_path / "ours", tokens, size=2):
        torch.testing.assert_close(result, alone, rtol=0, atol=2e-6 * float(alone.abs().max()))


def test_names_without_the_prefix_and_with_buffers(tmp_path):
    """The file of the original gpt2: `h.0.attn.c_attn.weight`, and masks stored as tensors."""
    extra = {f"h.{n}.attn.bias": torch.ones(1, 1, 32, 32).bool() for n in range(2)}
    theirs = write_theirs(
        tmp_path / "hf", GPT2, lambda name: name.removeprefix("transformer."), extra
    )
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    word = open_checkpoint(tmp_path / "ours").read("model/embedding.word.weight")
    assert torch.equal(word, theirs["wte.weight"])


def test_rounding_on_request_and_the_dtype_is_said(tmp_path):
    write_theirs(tmp_path / "hf", LLAMA)
    ours, out = str(tmp_path / "ours"), str(tmp_path / "out")
    assert main(["import", str(tmp_path / "hf"), ours, "--dtype", "float16"]) == 0
    assert open_checkpoint(ours).dtype("model/final_norm.weight") == torch.float16
    assert main(["export", ours, out, "--dtype", "bfloat16"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert read_theirs(tmp_path / "out")["model.norm.weight"].dtype == torch.bfloat16


def test_tokenizer_files_travel(tmp_path):
    write_theirs(tmp_path / "hf", GPT2)
    (tmp_path / "hf" / "tokenizer.json").write_text('{"kept": 1}')
    (tmp_path / "hf" / "generation_config.json").write_text('{"top_k": 7}')
    (tmp_path / "hf" / "evil.py").write_text("")
    main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")])
    main(["export", str(tmp_path / "ours"), str(tmp_path / "out")])
    kept = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.json")}
    assert set(kept) == {"config.json", "generation_config.json", "tokenizer.json"}
    assert (kept["generation_config.json"], kept["tokenizer.json"]) == (
        '{"top_k": 7}',
        '{"kept": 1}',
    )
    assert not list((tmp_path / "out").glob("*.py"))


@pytest.mark.parametrize("own", [False, True])
def test_generation_config_beside_another_tokenizer(tmp_path, own):
    """--tokenizer replaces the tokenizer's files as a whole, generation_config.json only by its."""
    write_theirs(tmp_path / "hf", GPT2)
    (tmp_path / "hf" / "generation_config.json").write_text('{"top_k": 7}')
    (tmp_path / "hf" / "vocab.json").write_text("{}")
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text("{}")
    if own:
        (other / "generation_config.json").write_text('{"top_k": 8}')
    main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")])
    out = tmp_path / "out"
    main(["export", str(tmp_path / "ours"), str(out), "--tokenizer", str(other)])
    assert json.loads((out / "generation_config.json").read_text()) == {"top_k": 7 + own}
    assert (out / "tokenizer.json").exists() and not (out / "vocab.json").exists()


def test_the_model_is_never_whole_in_memory(tmp_path, monkeypatch):
    write_theirs(tmp_path / "hf", LLAMA | {"num_hidden_layers": 8})
    alive, most = weakref.WeakSet(), []

    def watched(read):
        def watched_read(*args, **kwargs):
            tensor = read(*args, **kwargs)
            alive.add(tensor)
            most.append(len(alive))
            return tensor

        return watched_read

    folder, checkpoint = hf_folder.HFFolder, convert_hf.Checkpoint
    monkeypatch.setattr(folder, "read", watched(folder.read))
    monkeypatch.setattr(checkpoint, "read", watched(checkpoint.read))
    main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")])
    main(["export", str(tmp_path / "ours"), str(tmp_path / "out")])
    assert len(most) > 100
    assert max(most) <= 5, "q, k, v, and what came just before"


# ---- refusals --------------------------------------------------------------------------------


def change_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def truncated(folder):
    os.truncate(folder / "model.safetensors", 20_000)


def not_tensors(folder):
    (folder / "model.safetensors").write_bytes(b"\x80\x04 a pickle" * 100)


def only_pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def no_config(folder):
    (folder / "config.json").unlink()


def broken_config(folder):
    (folder / "config.json").write_text("{")


def index_of(folder, **changes):
    """Turns the one file into a shard with its index."""
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    names = hf_folder.safetensors_header(folder / "a.safetensors")[1]
    index = {"weight_map": dict.fromkeys(names, "a.safetensors") | changes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def missing_shard(folder):
    index_of(folder, **{"model.norm.weight": "b.safetensors"})


def lying_index(folder):
    index_of(folder, **{"model.layers.9.mlp.up_proj.weight": "a.safetensors"})


def outside_shard(folder):
    (folder.parent / "b.safetensors").write_bytes(b"")
    index_of(folder, **{"model.norm.weight": "../b.safetensors"})


@pytest.mark.parametrize(
    "damage, words",
    [
        (change_config(model_type="mamba"), "'mamba' is not supported; gpt2, llama, bert are"),
        (change_config(hidden_act="gelu"), "hidden_act gelu (only silu is supported)"),
        (change_config(mlp_bias=True), "attention_bias False without the same mlp_bias"),
        (change_config(rope_scaling={"rope_type": "yarn"}), "rope_type yarn"),
        (change_config(vocab_size="many"), "vocab_size missing or no number"),
        (change_config(num_hidden_layers=3), "model.layers.2.input_layernorm.weight"),
        (change_config(num_hidden_layers=1), "model.layers.1.input_layernorm.weight"),
        (change_config(intermediate_size=64), "is (48, 32), config.json means (64, 32)"),
        (change_config(num_key_value_heads=3), "--num-query-groups 3"),
        (truncated, "has 20000 bytes, its header speaks of"),
        (not_tensors, "is not a safetensors file"),
        (only_pickled, "pytorch_model.bin), which are never opened"),
        (no_config, "config.json is missing"),
        (broken_config, "not readable JSON"),
        (missing_shard, "b.safetensors is missing"),
        (lying_index, "lies: model.layers.9.mlp.up_proj.weight"),
        (outside_shard, "b.safetensors is missing"),
    ],
)
def test_what_cannot_be_imported_is_named_and_nothing_is_written(tmp_path, capsys, damage, words):
    write_theirs(tmp_path / "hf", LLAMA)
    damage(tmp_path / "hf")
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "ours").exists()


def test_rope_scaling_of_other_constants_is_refused():
    ours, wrong = llama_rope({"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}})
    assert ours["use_rope_scaling"] and wrong == ["low_freq_factor 2.0 (only 1.0 is supported)"]


def test_a_folder_that_is_in_use_is_not_written_to(tmp_path, capsys):
    write_theirs(tmp_path / "hf", GPT2)
    ours = str(tmp_path / "ours")
    assert main(["import", str(tmp_path / "hf"), ours]) == 0
    assert main(["import", str(tmp_path / "hf"), ours]) == 2
    assert "already has checkpoints (0)" in capsys.readouterr().err
    assert main(["export", ours, str(tmp_path / "hf")]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_model_that_no_family_has_is_refused_with_every_reason():
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8}
    with pytest.raises(Unsupported) as raised:
        family_for(GPTConfig(**shape, vocab_size=9, swiglu=True, normalization="RMSNorm"))
    for words in ("gpt2: --normalization RMSNorm (it has LayerNorm); --swiglu True (it has False)",
                  "llama: --position-embedding-type learned_absolute (it has rope)"):  # fmt: skip
        assert words in str(raised.value)


def test_another_models_checkpoint_is_not_exported(tmp_path, capsys):
    save(tmp_path / "ours", 1, [single("model/w", torch.ones(2))], {"model": {}}, Group.single("w"))
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "out")]) == 2
    assert "is not a GPT's" in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.tmp").exists()
