"""scripts/convert_hf.py: the ids of special tokens travel, and no other model's take their place.

transformers writes 50256 for a GPT-2, and 1 and 2 for a Llama, where config.json has no ids.
"""

import json

import pytest

from core.comm import Group
from scripts.convert_hf import main
from tests.recipe import run_recipe
from tests.scripts.test_convert_hf import BERT, GPT2, LLAMA, write_theirs
from tests.scripts.test_generate import write_byte_tokenizer

NONE = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
IMPORTED = {
    "gpt2": (GPT2, {"bos_token_id": 99, "eos_token_id": 100}),
    "llama": (LLAMA, {"bos_token_id": 90, "eos_token_id": [91, 98, 99], "pad_token_id": 0}),
    "llama, no end": (LLAMA, {"bos_token_id": 90, "eos_token_id": None}),
    "bert": (BERT, {"pad_token_id": 7}),
}


def exported(folder, *flags):
    """The ids in config.json, which are those that transformers reads."""
    assert main(["export", str(folder), str(folder.parent / "out"), *map(str, flags)]) == 0
    config = json.loads((folder.parent / "out" / "config.json").read_text())
    ids = {name: config[name] for name in NONE}
    try:
        from transformers import AutoConfig
    except ImportError:
        return ids
    theirs = AutoConfig.from_pretrained(folder.parent / "out")
    assert {name: getattr(theirs, name) for name in NONE} == ids
    return ids


def imported(tmp_path, config):
    write_theirs(tmp_path / "hf", config)
    assert main(["import", str(tmp_path / "hf"), str(tmp_path / "ours")]) == 0
    return tmp_path / "ours"


@pytest.mark.parametrize("kind", IMPORTED)
def test_imported_ids_come_back(tmp_path, kind):
    """Also where the tokenizer would say something else."""
    config, ids = IMPORTED[kind]
    folder = imported(tmp_path, config | ids)
    (folder / "tokenizer").mkdir()
    write_byte_tokenizer(folder / "tokenizer")
    assert exported(folder) == NONE | ids


@pytest.mark.parametrize("config", [GPT2, LLAMA, BERT], ids=["gpt2", "llama", "bert"])
def test_what_is_not_known_is_null(tmp_path, config, capsys):
    assert exported(imported(tmp_path, config)) == NONE
    name = "pad" if config is BERT else "eos"
    assert f"{name}_token_id is null in config.json: there is no" in capsys.readouterr().out


@pytest.mark.parametrize("given", [False, True])
def test_the_end_is_the_tokenizers(tmp_path, given):
    """Of the one that was imported, or of --tokenizer."""
    folder = imported(tmp_path, LLAMA | {"vocab_size": 257})
    place = tmp_path / "given" if given else folder / "tokenizer"
    place.mkdir()
    write_byte_tokenizer(place)
    flags = ("--tokenizer", place) if given else ()
    assert exported(folder, *flags) == NONE | {"eos_token_id": 256}


def test_a_run_of_our_own(tmp_path):
    flags = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 49)
    run_recipe(Group.single("world"), *flags, "--train-iters", 1, "--save", tmp_path / "run")
    assert exported(tmp_path / "run") == NONE | {"eos_token_id": 49}


def test_a_damaged_tokenizer_leaves_null(tmp_path, capsys):
    folder = imported(tmp_path, GPT2)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    assert exported(folder) == NONE
    assert "eos_token_id is null in config.json: --tokenizer-model" in capsys.readouterr().out
