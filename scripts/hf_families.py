"""The model types of transformers that can be converted: by name, and by our config.

Read by convert_hf.py and hf_folder.py. The rules are in hf_layout.py and hf_bert.py.
"""

from __future__ import annotations

from models.config import BertConfig, GPTConfig
from scripts.hf_bert import BERT
from scripts.hf_layout import GPT2, LLAMA, Family, Unsupported

FAMILIES = {family.model_type: family for family in (GPT2, LLAMA, BERT)}


def family_of(theirs: dict) -> Family:
    """By config.json's model_type; Unsupported names what there is."""
    kind = theirs.get("model_type")
    if kind not in FAMILIES:
        raise Unsupported(f"model_type {kind!r} is not supported; {', '.join(FAMILIES)} are")
    return FAMILIES[kind]


def family_for(config: GPTConfig | BertConfig) -> Family:
    """The family that can hold a model of ours; Unsupported says what keeps it from each."""
    reasons = []
    for family in FAMILIES.values():
        if not isinstance(config, family.kind):
            continue
        try:
            family.describe(config)
        except Unsupported as error:
            reasons.append(str(error))
        else:
            return family
    raise Unsupported("no supported model type fits: " + " | ".join(reasons))
