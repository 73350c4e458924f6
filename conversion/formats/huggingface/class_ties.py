"""Which weights a class of transformers ties, asked of the class itself.

transformers and torch take 300 MiB and seconds to import. A process that has neither, as ``vescale-convert`` where
bytes only move, asks in a child process, which is gone before data moves, and its own memory stays inside the budget:

    python -m vescale_fsdp.conversion.formats.huggingface.class_ties < config.json      prints the answer as JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

__all__ = ["orientation_of_class", "ties_of_class"]

_LONGEST_S = 600

Answer = tuple[dict[str, str] | None, tuple[str, ...]]
"""Name -> the name that stands for it, None if there is no such class; and warnings."""


# Classes without Conv1D: for these nobody is asked.
_ALL_LINEAR = frozenset(
    f"{family}ForCausalLM" for family in ("Gemma", "Gemma2", "Llama", "Mistral", "Phi3", "Qwen2", "Qwen3")
)


def orientation_of_class(config: Mapping[str, Any], class_name: str, module: str) -> bool | None:
    """Whether a module of a class has its weight as [in, out] (Conv1D) rather than [out, in] (Linear).

    Args:
        module: its name in memory, or the end of it.

    Returns:
        None if there is no such class in transformers, or no such module in it.
    """
    if class_name in _ALL_LINEAR:
        return False
    return _matching(_orientations(json.dumps(config, sort_keys=True), class_name), module)


def _matching(known: Mapping[str, bool], module: str) -> bool | None:
    found = {
        is_transposed
        for name, is_transposed in known.items()
        if name == module or name.endswith(f".{module}") or module.endswith(f".{name}")
    }
    return found.pop() if len(found) == 1 else None


@cache
def _orientations(config: str, class_name: str) -> Mapping[str, bool]:
    if "torch" in sys.modules or not sys.executable:
        return _linear_modules(json.loads(config), class_name)
    if "transformers" not in sys.modules and find_spec("transformers") is None:
        return {}
    child = [sys.executable, "-m", __name__, class_name, "modules"]
    try:
        done = subprocess.run(
            child, input=config, capture_output=True, text=True, check=True, timeout=_LONGEST_S
        )
        found: dict[str, bool] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError):
        return {}
    return found


def _linear_modules(config: Mapping[str, Any], class_name: str) -> dict[str, bool]:
    """Linear and Conv1D modules -> whether their weights are [in, out]."""
    try:
        import torch
        import transformers
        from transformers.pytorch_utils import Conv1D
    except ImportError:
        return {}
    model_class: Any = getattr(transformers, class_name, None)
    is_class = isinstance(model_class, type)
    if not (is_class and issubclass(model_class, transformers.PreTrainedModel)):
        return {}
    try:
        with torch.device("meta"):
            model = model_class(model_class.config_class.from_dict(dict(config)))
    except Exception:  # noqa: BLE001  of whatever kind a model's code raises for settings it cannot take
        return {}
    kinds = (torch.nn.Linear, Conv1D)
    return {name: isinstance(m, Conv1D) for name, m in model.named_modules() if isinstance(m, kinds)}


def ties_of_class(config: Mapping[str, Any], class_name: str) -> Answer:
    """The ties of a class with the settings of a config.json, under names of the model and of its files."""
    if "torch" in sys.modules or not sys.executable:
        return _answer(config, class_name)
    if "transformers" not in sys.modules and find_spec("transformers") is None:
        return None, ()
    child = [sys.executable, "-m", "vescale_fsdp.conversion.formats.huggingface.class_ties", class_name]
    try:
        done = subprocess.run(
            child, input=json.dumps(config), capture_output=True, text=True, check=True, timeout=_LONGEST_S
        )
        found, warnings = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        return None, (_unsaid(class_name, error),)
    return found, tuple(warnings)


def _answer(config: Mapping[str, Any], class_name: str) -> Answer:
    try:
        import torch
        import transformers
    except ImportError:
        return None, ()
    model_class: Any = getattr(transformers, class_name, None)
    is_class = isinstance(model_class, type)
    if not (is_class and issubclass(model_class, transformers.PreTrainedModel)):
        return None, ()
    try:
        with torch.device("meta"):
            model = model_class(model_class.config_class.from_dict(dict(config)))
        ties = dict(model.get_expanded_tied_weights_keys(all_submodels=True))
        return {**ties, **_in_files(model, ties)}, ()
    except Exception as error:  # noqa: BLE001  of whatever kind a model's code raises for settings it cannot take
        return None, (_unsaid(class_name, error),)


def _in_files(model: Any, ties: Mapping[str, str]) -> dict[str, str]:
    """The same under the names that transformers gives them in files, where these are of before version 5."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors = model.state_dict()
    names: dict[str, str] = {}
    for name in {*ties, *ties.values()} & tensors.keys():
        renamed = list(revert_weight_conversion(model, {name: tensors[name]}))
        names[name] = renamed[0] if len(renamed) == 1 else name
    return {names.get(twin, twin): names.get(kept, kept) for twin, kept in ties.items()}


def _unsaid(class_name: str, error: Exception) -> str:
    return (
        f"transformers could not say which weights of {class_name} are tied: {type(error).__name__}: {error}"
    )


def main() -> None:
    """Answer for a class named as the argument, settings as JSON on stdin; on stdout, as its last line."""
    answer = _linear_modules if sys.argv[2:] == ["modules"] else _answer
    print(json.dumps(answer(json.load(sys.stdin), sys.argv[1])))


if __name__ == "__main__":
    main()
