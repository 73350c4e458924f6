"""Find out which weights a class of transformers has. This module imports torch and transformers.

It runs as a script in a child process (see `model_class`), so it imports no other module of this package:

    python -I class_child.py < request      request and answer are JSON; stdout contains only the answer

The class is instantiated on the meta device, which allocates no weights. Only transformers' own classes are used:
Python code in a repository is never imported, and nothing is downloaded.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

_BYTES_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
# A line ``NAME | CONVERSION ..`` in the load report that transformers logs: it could not convert tensors to NAME.
_CONVERSION = re.compile(r"^(\S+)\s*\|\s*CONVERSION\b", re.MULTILINE)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer one request: describe a class, or check whether it loads given tensors.

    Args:
        request: ``class`` (its name) and ``config`` (of config.json); for a check also ``tensors``: name -> [shape,
            torch's name of the dtype].

    Returns:
        For a check, ``{"problems": [...]}``. For a description, ``"forms"``: name -> shape of all tensors, first in
        memory, then in files; ``"ties"``: name -> the name it is tied to, in both forms; and ``"modules"``: name of a
        Linear or Conv1D module -> whether its weight is [in, out]. If there is no answer, ``{"unknown": reason}``, with
        ``"is_absent"`` if transformers or the class is missing.
    """
    try:
        import torch  # noqa: F401  transformers can be imported without torch, but then has no models
        import transformers
    except ImportError as error:
        return {"unknown": str(error), "is_absent": True}
    name = request["class"]
    model_class: Any = getattr(transformers, name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        # auto_map: the class is defined in a Python file of the repository.
        code = "; code of the repository itself is not run" if request["config"].get("auto_map") else ""
        return {
            "unknown": f"transformers {transformers.__version__} has no class {name}{code}",
            "is_absent": True,
        }
    try:
        return (
            _load(model_class, request) if "tensors" in request else _describe(model_class, request["config"])
        )
    except Exception as error:  # noqa: BLE001  a model's code may raise anything for unsupported settings
        return {"unknown": f"{type(error).__name__}: {error}"}


def _describe(model_class: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a class with these settings: the entries ``forms``, ``ties`` and ``modules`` of an answer."""
    import torch
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.pytorch_utils import Conv1D

    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(dict(config)))
    tensors = model.state_dict()
    in_files = revert_weight_conversion(model, dict(tensors))
    ties = dict(model.get_expanded_tied_weights_keys(all_submodels=True))
    names: dict[str, str] = {}  # name in memory -> name in files
    # Converted one by one: the conversion of all tensors does not say which name became which.
    for name in {*ties, *ties.values()} & tensors.keys():
        renamed = list(revert_weight_conversion(model, {name: tensors[name]}))
        names[name] = renamed[0] if len(renamed) == 1 else name
    kinds = (torch.nn.Linear, Conv1D)
    return {
        "forms": [{n: list(t.shape) for n, t in form.items()} for form in (tensors, in_files)],
        "ties": {**ties, **{names.get(a, a): names.get(b, b) for a, b in ties.items()}},
        "modules": {n: isinstance(m, Conv1D) for n, m in model.named_modules() if isinstance(m, kinds)},
    }


def _load(model_class: Any, request: Mapping[str, Any]) -> dict[str, Any]:
    """Load tensors of the meta device with ``from_pretrained``, and return the problems that it reports.

    ``from_pretrained`` applies the class's own renames, ties and quantizer.
    """
    import torch

    if find_spec("accelerate") is None:  # transformers needs it for a device map
        return {"unknown": "accelerate is not installed"}
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        for name, (shape, dtype) in request["tensors"].items()
    }
    reports = _Reports()
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(reports)
    is_quantized = False
    try:
        config = model_class.config_class.from_dict(dict(request["config"]))
        # The setting may be in the config of the text part, as of a model for text and images.
        is_quantized = any(
            getattr(part, "quantization_config", None)
            for part in (config, config.get_text_config(decoder=True))
        )
        _, info = model_class.from_pretrained(
            None,  # no folder: the tensors are passed as a state dict
            config=config,
            state_dict=tensors,
            device_map="meta",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # list all mismatched shapes instead of raising for the first
            local_files_only=True,
        )
    except ImportError as error:  # a quantizer or a class needs another package
        return {"unknown": str(error).strip()}
    except Exception as error:  # noqa: BLE001  transformers may raise anything for tensors that do not fit
        failed = sorted(set(_CONVERSION.findall(reports.text)))
        if is_quantized:
            return {"unknown": f"{type(error).__name__}: {error}"}
        if failed:
            return {"problems": [f"cannot be converted from the given tensors: {name}" for name in failed]}
        return {"problems": [f"the class raises {type(error).__name__}: {error}"]}
    finally:
        logger.removeHandler(reports)
    return {
        "problems": [
            *(f"missing: {name}" for name in sorted(info["missing_keys"])),
            *(f"unexpected: {name}" for name in sorted(info["unexpected_keys"])),
            *(
                f"wrong shape: {name} is {list(given)}, the class has {list(expected)}"
                for name, given, expected in sorted(info["mismatched_keys"])
            ),
            *map(str, info["error_msgs"]),
        ]
    }


class _Reports(logging.Handler):
    """Collects the warnings and errors of a logger as text."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def main() -> None:
    """Read a request from stdin and write the answer to stdout; what libraries print to stdout goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # on the file descriptor, which C libraries write to
    request = json.load(sys.stdin)
    sys.path[:] = request["path"]  # the parent's: ``-I`` ignores PYTHONPATH and the user's site-packages
    reply = answer(request)
    reply["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_OF_MAXRSS
    with out:
        json.dump(reply, out)


if __name__ == "__main__":
    main()
