"""Write the table of the parameters of common transformers classes: names, shapes, ties, as functions of config.json.

    python -m tools.class_table                 builds models of the installed transformers on the meta device; a minute
    python -m tools.class_table LlamaForCausalLM ...       prints the rows of some classes instead

Each class is built with several sets of distinct sizes, so that every dim of every parameter can be matched with an
expression of config fields, and with every option turned on and off. A class is added to the table only if its row
predicts the parameters for random sizes and options. Other fields that change parameters must have their default value
(``fixed``); otherwise the converter builds the class itself (see `model_class`).
"""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from vescale_fsdp.conversion.formats.huggingface import model_class
from vescale_fsdp.conversion.formats.huggingface.class_child import ties_of
from vescale_fsdp.conversion.formats.huggingface.model_class import ClassForm, expected_by

Settings = dict[str, Any]
Row = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

_FAMILIES = (
    *(
        "Llama",
        "Mistral",
        "Mixtral",
        "Qwen2",
        "Qwen2Moe",
        "Qwen3",
        "Qwen3Moe",
        "Gemma",
        "Gemma2",
        "Gemma3",
        "Phi3",
    ),
    *(
        "GPTNeoX",
        "GptOss",
        "Granite",
        "Olmo",
        "Olmo2",
        "Olmo3",
        "OPT",
        "Cohere",
        "Cohere2",
        "Starcoder2",
        "SmolLM3",
    ),
    *("Helium", "Glm", "Glm4", "Ernie4_5", "SeedOss", "Nemotron", "HunYuanDenseV1", "Exaone4"),
)
COMMON = (
    *(f"{family}ForCausalLM" for family in _FAMILIES),
    *("GPT2LMHeadModel", "BertForMaskedLM", "RobertaForMaskedLM", "DistilBertForMaskedLM"),
)
# Tried and not described: experts in some layers only (DeepSeek-V3, GLM-4-MoE), hybrids of attention and state space
# models, names that depend on heads (StableLM), sizes that a config computes (LFM2, ModernBERT, Mamba).
_OTHERS = (
    "AlbertForMaskedLM AlbertModel ApertusForCausalLM ArceeForCausalLM BertForSequenceClassification "
    "BertForTokenClassification BertLMHeadModel BertModel BioGptForCausalLM BitNetForCausalLM "
    "BloomForCausalLM CLIPTextModel CamembertForMaskedLM CamembertModel CodeGenForCausalLM "
    "Cohere2MoeForCausalLM CwmForCausalLM DistilBertForSequenceClassification "
    "DistilBertForTokenClassification DistilBertModel ElectraForMaskedLM ElectraModel FlexOlmoForCausalLM "
    "GPTBigCodeForCausalLM GPTJForCausalLM Gemma2Model Gemma3TextModel GemmaModel GraniteMoeForCausalLM "
    "HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM Jais2ForCausalLM JetMoeForCausalLM "
    "LlamaForSequenceClassification LlamaModel MPNetForMaskedLM MPNetModel MinistralForCausalLM "
    "MistralForSequenceClassification MistralModel MptForCausalLM NanoChatForCausalLM OlmoeForCausalLM "
    "OpenAIGPTLMHeadModel PersimmonForCausalLM PhiForCausalLM PhimoeForCausalLM "
    "Qwen2ForSequenceClassification Qwen2Model Qwen3ForSequenceClassification Qwen3Model RobertaForCausalLM "
    "RobertaForSequenceClassification RobertaForTokenClassification RobertaModel VaultGemmaForCausalLM "
    "ViTForImageClassification XLMRobertaForMaskedLM XLMRobertaForSequenceClassification "
    "XLMRobertaForTokenClassification XLMRobertaModel "
)
CLASSES = (*COMMON, *_OTHERS.split())
# Fields that change no parameter of any class. All other fields are tried.
HARMLESS = re.compile(
    r".*token_ids?|.*rope.*|.*layer_types|.*act|.*activation(_function)?|.*dtype|id2label|label2id|architectures|model_type"
    r"|transformers_version|_name_or_path|problem_type|.*attn_implementation|sliding_window.*|max_window_layers|task_specific"
    r"|use_cache|return_dict|output_.*|position_embedding_type|no_rope_layers|_sliding_window_pattern|initializer.*"
)
FILE = Path(model_class.__file__).with_name("class_table.json")


def sizes(keys: Mapping[str, Any], seed: int) -> Settings:
    """A value for each field of a config whose name is that of a size."""
    rng = random.Random(seed)
    kv, group = rng.sample([2, 3, 5], 2)
    heads, odd = kv * group, iter(rng.sample([61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113], 8))
    hidden = heads * 2 * rng.choice([13, 17, 19])
    known = {
        r"vocab_size": next(odd),
        r"hidden_size|n_embd|dim": hidden,
        r"word_embed_proj_dim": hidden,
        r"intermediate_size|n_inner|ffn_dim|hidden_dim": next(odd),
        r"moe_intermediate_size": next(odd),
        r"shared_expert_intermediate_size": next(odd),
        r"num_hidden_layers|n_layers?": 2 + seed % 2,
        r"num_attention_heads|n_heads?": heads,
        r"num_key_value_heads": kv,
        r"head_dim": 2 * rng.choice([7, 11]),
        r"num_local_experts|num_experts": 4 + 3 * (seed % 2),
        r"max_position_embeddings|n_positions": next(odd),
        r"type_vocab_size": 23,
        r"d_model": hidden,
        r"embedding_size": next(odd),
        r"n_routed_experts|moe_num_experts": 4 + 3 * (seed % 2),
    }
    names = [*keys, "head_dim"]  # many classes read it although their config does not define it
    found = {key: value for key in names for form, value in known.items() if re.fullmatch(form, key)}
    return found | {key: 2 for key in keys if key in ("num_experts_per_tok",)}


def made(class_name: str, settings: Settings) -> tuple[Any, list[Shapes], dict[str, str]]:
    """Build a class on the meta device: the model, its shapes by the names in memory and in files, and its
    ties by both."""
    model_class = getattr(transformers, class_name)
    settings = {key: value for key, value in settings.items() if not key.endswith("token_id")}
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict({**settings, "pad_token_id": 0}))
    tensors = model.state_dict()
    in_files = revert_weight_conversion(model, dict(tensors))
    forms = [{name: tuple(tensor.shape) for name, tensor in form.items()} for form in (tensors, in_files)]
    return model, forms[: 1 + (forms[0] != forms[1])], ties_of(model)[0]


class Unfit(Exception):
    """A class that the table cannot describe."""


def row_of(class_name: str) -> Row:
    """The row of a class in the table.

    Raises:
        Unfit: if the table cannot describe the class.
    """
    defaults = getattr(transformers, class_name).config_class().to_dict()
    aliases = dict(getattr(transformers, class_name).config_class.attribute_map)
    keys = {aliases.get(key, key): value for key, value in defaults.items()}
    bases = [sizes(keys, seed) for seed in range(3)]
    flags = {
        key: value for key, value in keys.items() if isinstance(value, bool) and not HARMLESS.fullmatch(key)
    }
    flags.setdefault("tie_word_embeddings", True)
    forms = made(class_name, {**bases[0], **flags})[1]
    fields = [key for key in bases[0] if key != "num_experts_per_tok"]
    row: Row = {"fields": {}, "flags": {}, "fixed": {}, "forms": [], "only_if": {}}
    # Options: the names that exist only with each value.
    turning: dict[str, dict[bool, list[set[str]]]] = {}
    for flag, value in flags.items():
        try:
            turned = made(class_name, {**bases[0], **flags, flag: not value})[1]
        except Exception:  # noqa: BLE001  the model's code may raise any
            row["fixed"][flag] = value
            continue
        if turned == forms:
            continue
        common = [
            name
            for a, b in zip(turned, forms, strict=False)
            for name in a.keys() & b.keys()
            if a[name] != b[name]
        ]
        if common or len(turned) != len(forms):
            row["fixed"][flag] = value
            continue
        turning[flag] = {value: [set(f) for f in forms], not value: [set(t) for t in turned]}
    row["flags"] = {flag: flags[flag] for flag in (*turning, "tie_word_embeddings")}
    everything: list[list[Shapes]] = []
    for base in bases:
        union: list[Shapes] = [{} for _ in forms]
        for values in itertools.product(*([False, True] for _ in turning)):
            for place, form in enumerate(
                made(class_name, {**base, **flags, **dict(zip(turning, values, strict=True))})[1]
            ):
                union[place] |= form
        everything.append(union)
    for flag, sides in turning.items():
        for place in range(len(forms)):
            for value in (False, True):
                for name in sides[value][place] - sides[not value][place]:
                    row["only_if"].setdefault(_template(name, bases[0], everything[0][place]), {})[flag] = (
                        value
                    )
    for place in range(len(forms)):
        row["forms"].append(_described([union[place] for union in everything], bases, fields))
    used = {
        word
        for form in row["forms"]
        for name, dims in form.items()
        for text in (name, *dims)
        for word in re.findall(r"[A-Za-z]\w*", text)
    }
    row["fields"] = {field: {} for field in fields if field in used}
    row["aliases"] = {
        alias: key for alias, key in aliases.items() if key in row["fields"] or key in row["flags"]
    }
    row["tied"] = [
        _ties(class_name, {**bases[0], **flags, "tie_word_embeddings": value}) for value in (False, True)
    ]
    row["ignored"] = sorted(_ignored(class_name, {**bases[0], **flags}))
    row["conv1d"] = sorted(_conv1d(class_name, {**bases[0], **flags}))
    row["fixed"] |= _fixed(class_name, keys, {**bases[0], **flags}, fields, turning)
    for field in row["fields"]:
        for given, settings in (("absent", {}), ("null", {field: None})):
            found = _value_for(
                class_name, row, field, keys.get(field), [{**base, **flags} for base in bases[1:]], settings
            )
            if found is not None:
                row["fields"][field][given] = found
    check_row(class_name, row, range(3, 9))
    return {key: value for key, value in row.items() if value}


def check_row(class_name: str, row: Row, seeds: range) -> None:
    """Compare a row with its class for random sizes and options.

    Raises:
        Unfit: at the first difference.
    """
    defaults = getattr(transformers, class_name).config_class().to_dict()
    for seed in seeds:
        rng = random.Random(seed)
        settings = sizes(defaults, seed) | {flag: rng.random() < 0.5 for flag in row["flags"]}
        settings |= row["fixed"]
        _, forms, ties = made(class_name, settings)
        found = expected_by(row, settings)
        if found is None or list(found.forms) != forms or found.ties != ties:
            raise Unfit(f"its parameters differ from the row's for {settings}")


def _template(name: str, base: Settings, shapes: Shapes) -> str:
    """A name with the fields that count layers and experts instead of the indices of layers and experts."""
    counted = {value: key for key, value in base.items() if re.search(r"layer|experts$", key)}
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            head = ".".join(parts[:place])
            numbers = {
                int(other.split(".")[place])
                for other in shapes
                if other.startswith(f"{re.sub(r'{[^}]*}', '0', head)}.")
                and other.split(".")[place].isdecimal()
            }
            if numbers == set(range(len(numbers))) and len(numbers) in counted:
                parts[place] = f"{{{counted[len(numbers)]}}}"
    return ".".join(parts)


def _described(unions: list[Shapes], bases: list[Settings], fields: list[str]) -> dict[str, list[str]]:
    """Name template -> dims as expressions that are right for all bases.

    Raises:
        Unfit: if there are no such expressions.
    """
    seen: list[dict[str, tuple[int, ...]]] = []
    for union, base in zip(unions, bases, strict=True):
        by_template: dict[str, tuple[int, ...]] = {}
        for name, shape in union.items():
            if by_template.setdefault(_template(name, base, union), shape) != shape:
                raise Unfit(f"{name} has different shapes in different layers")
        seen.append(by_template)
    if any(one.keys() != seen[0].keys() for one in seen):
        raise Unfit(f"names: {sorted(seen[0].keys() ^ seen[1].keys())[:4]}")
    found: dict[str, list[str]] = {}
    for template in seen[0]:
        shapes = [one[template] for one in seen]
        found[template] = [
            _expression([shape[dim] for shape in shapes], bases, fields, template)
            for dim in range(len(shapes[0]))
        ]
    return found


def _candidates(fields: list[str]) -> Iterator[str]:
    yield from ("1", "2", "3")
    yield from fields
    yield from (f"{factor}*{field}" for field in fields for factor in (2, 3, 4))
    yield from (f"{a}*{b}" for a, b in itertools.combinations(fields, 2))
    yield from (f"2*{a}*{b}" for a, b in itertools.combinations(fields, 2))
    yield from (f"{a}*{c}+2*{b}*{c}" for a, b, c in itertools.permutations(fields, 3))
    yield from (f"{field}+{add}" for field in fields for add in (2,))
    yield from (f"{a}//{b}" for a, b in itertools.permutations(fields, 2))
    yield from (f"{a}*{b}//{c}" for a, b, c in itertools.permutations(fields, 3))
    yield from (f"{a}*{b}+2*{a}//{b}" for a, b in itertools.permutations(fields, 2))


def _expression(values: list[int], bases: list[Settings], fields: list[str], where: str) -> str:
    for text in _candidates(fields):
        if all(model_class.size(text, base) == value for value, base in zip(values, bases, strict=True)):
            return text
    # A number that no size changes: a field that does has its default in `fixed`.
    if len(set(values)) == 1:
        return str(values[0])
    raise Unfit(f"no expression for {values} in {where}")


def _value_for(
    class_name: str, row: Row, field: str, default: Any, bases: list[Settings], settings: Settings
) -> int | str | None:
    """The value of a field that config.json lacks, or that is null; None if it is not known."""
    others = [name for name in row["fields"] if name != field]
    candidates: list[int | str] = [default] if isinstance(default, int) else []
    candidates += [
        *others,
        *(f"{a}//{b}" for a, b in itertools.permutations(others, 2)),
        *(f"4*{a}" for a in others),
    ]
    without = [{key: value for key, value in base.items() if key != field} for base in bases]
    try:
        wanted = [made(class_name, {**base, **settings})[1] for base in without]
    except Exception:  # noqa: BLE001  the model's code may raise any
        return None
    for text in candidates:
        try:
            tried = [{**base, field: model_class.size(str(text), base)} for base in without]
        except ZeroDivisionError:
            continue
        if all(list(_forms(row, one)) == forms for one, forms in zip(tried, wanted, strict=True)):
            return text
    return None


def _forms(row: Row, settings: Settings) -> list[ClassForm]:
    found = expected_by({**row, "fixed": {}}, settings)
    return [] if found is None else list(found.forms)


def _ties(class_name: str, settings: Settings) -> dict[str, str]:
    return made(class_name, settings)[2]


def _ignored(class_name: str, settings: Settings) -> set[str]:
    """Patterns of names that the class ignores without a warning."""
    model = made(class_name, settings)[0]
    found = set(model._keys_to_ignore_on_load_unexpected or ())
    buffers = [name for name, _ in model.named_buffers()]
    found |= (
        {r"rotary_emb\.inv_freq"} if any(name.endswith("rotary_emb.inv_freq") for name in buffers) else set()
    )
    found |= {r"(^|\.)position_ids$"} if any(name.endswith("position_ids") for name in buffers) else set()
    return found


def _conv1d(class_name: str, settings: Settings) -> set[str]:
    model = made(class_name, settings)[0]
    return {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, transformers.pytorch_utils.Conv1D)
    }


def _fixed(
    class_name: str, keys: Mapping[str, Any], base: Settings, fields: list[str], turning: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields, neither sizes nor options, that change parameters or might -> the value that they must have."""
    plain = made(class_name, base)[1:]
    found: dict[str, Any] = {}
    for key, value in keys.items():
        if key in fields or key in turning or HARMLESS.fullmatch(key) or isinstance(value, float):
            continue
        if isinstance(value, bool):
            continue  # tried already
        others = [value + 1, 2 * value + 4] if isinstance(value, int) else [7, True] if value is None else []
        is_free = bool(others)
        for other in others:
            try:
                is_free = is_free and made(class_name, {**base, key: other})[1:] == plain
            except Exception:  # noqa: BLE001  the model's code may raise any
                is_free = False
        if not is_free:
            found[key] = value
    return found


def main() -> None:
    """Write the table, or print some rows."""
    chosen = sys.argv[1:]
    rows: dict[str, Row] = {}
    for class_name in chosen or CLASSES:
        if getattr(transformers, class_name, None) is None:
            print(f"{class_name}: none in transformers {transformers.__version__}", file=sys.stderr)
            continue
        try:
            rows[class_name] = row_of(class_name)
        except Unfit as error:
            print(f"{class_name}: {error}", file=sys.stderr)
    if chosen:
        print(json.dumps(rows, indent=1))
        return
    lines = [
        f" {json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}" for name, row in sorted(rows.items())
    ]
    FILE.write_text("{\n" + ",\n".join([f' "transformers": "{transformers.__version__}"', *lines]) + "\n}\n")
    print(f"{len(rows)} classes, {FILE.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
