"""Upload a Hugging Face folder to the Hub, as one commit, by huggingface_hub's own API."""

from __future__ import annotations

import os

from vescale_fsdp.conversion.formats.huggingface.fingerprints import FINGERPRINTS_FILE
from vescale_fsdp.conversion.formats.huggingface.repository import ADAPTER_CONFIG
from vescale_fsdp.errors import ConversionError

_NUMBERS = f"-{'[0-9]' * 5}-of-{'[0-9]' * 5}"
_STEMS = (
    ("model", "safetensors"),
    ("pytorch_model", "bin"),
    ("diffusion_pytorch_model", "safetensors"),
    ("diffusion_pytorch_model", "bin"),
)
# Files at the top of a repository that must match the other files of a commit. Patterns of the Hub without `*`, which
# also matches `/`, and so files in folders, such as another model's.
_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
_MODEL = (
    *(f"{stem}{numbers}.{end}" for stem, end in _STEMS for numbers in ("", _NUMBERS)),
    *(f"{stem}.{end}.index.json" for stem, end in _STEMS),
    FINGERPRINTS_FILE,
    # transformers loads the base that an adapter's config names, and the adapter, instead of the weights next to it.
    ADAPTER_CONFIG,
    *_ADAPTER,
)


def check_push(repository: str) -> None:
    """Check what can be checked before files are written: huggingface_hub is installed, and the id is valid.

    Args:
        repository: as in `push`.

    Raises:
        ConversionError: if the package is missing, or the id is not valid.
    """
    try:
        from huggingface_hub.errors import HFValidationError  # optional
        from huggingface_hub.utils import validate_repo_id
    except ImportError as error:
        raise ConversionError(
            "The folder cannot be uploaded.",
            expected="the package huggingface_hub",
            got=f"{type(error).__name__}: {error}",
            where=f"--push {repository}",
            todo='install it: pip install "vescale-fsdp[hf]"',
        ) from error
    name, _, _ = repository.removeprefix("hf://").partition("@")
    try:
        validate_repo_id(name)
        problem = None if "/" in name else f"no owner in {name!r}"
    except HFValidationError as error:
        problem = str(error)
    if problem is not None:
        raise ConversionError(
            "This is not the id of a repository.",
            expected="an id such as org/model, or org/model@branch",
            got=problem,
            where=f"--push {repository}",
            todo="pass the id that the repository has, or will have, on the Hub",
        )


def push(folder: str, repository: str) -> str:
    """Upload a folder, and return the URL of the commit. The repository is made, private, if it does not exist.

    The commit removes weights of earlier commits that the folder does not have: transformers would load an old
    ``model.safetensors`` instead of new files with an index, and the base of an old adapter instead of both. The commit
    of an adapter removes only those of another adapter.

    Args:
        folder: a local folder.
        repository: ``org/model`` or ``org/model@branch``.

    Raises:
        ConversionError: as `check_push`, or if the Hub refuses the upload.
    """
    check_push(repository)
    from huggingface_hub import HfApi  # optional
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    name, _, branch = repository.removeprefix("hf://").partition("@")
    is_adapter = os.path.exists(os.path.join(folder, ADAPTER_CONFIG))
    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        if branch:
            api.create_branch(name, branch=branch, exist_ok=True)
        done = api.upload_folder(
            folder_path=folder,
            repo_id=name,
            revision=branch or None,
            commit_message="Upload by vescale-convert",
            delete_patterns=list(_ADAPTER if is_adapter else _MODEL),
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConversionError(
            "The folder cannot be uploaded.",
            expected="an id such as org/model, a Hub that can be reached, and a token that may write there",
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}",
            where=f"{folder} to {repository}",
            todo="set HF_TOKEN or run hf auth login; the folder is complete, so upload it: "
            f"hf upload {name} {folder} --revision {branch or 'main'}",
        ) from error
    return str(done.commit_url)
