"""Models of the Hugging Face hub, as folders of its local cache."""

import os
import re
from pathlib import Path
from typing import Optional

from checkpoint.hf_format import INDEX_FILE, WEIGHTS_FILE, read_json
from common.errors import CheckpointError
from common.remote import HUB_NAME, hub_folder, why_not

FILES = {"allow_patterns": ["*.safetensors", "*.json", "*.jinja", "README.md"], "ignore_patterns": ["*/*"]}


def is_model_name(name: str) -> bool:
    """Return whether this can name a model of the hub, perhaps with a revision: `owner/name@revision`.

    A path into a local folder, such as a misspelt `runs/frist`, names none.
    """
    model = name.partition("@")[0]
    is_path = "/" in model and os.path.isdir(model.partition("/")[0])
    return not is_path and HUB_NAME.fullmatch(model) is not None


def hub_model(name: str) -> Path:
    """Return the folder of a model of the hub, which is downloaded unless the cache has it.

    Raises:
        CheckpointError: the hub does not give it.
    """
    repository, _, revision = name.partition("@")
    try:
        return hub_folder(repository, "config.json", is_complete, revision or None, **FILES)
    except Exception as error:  # the hub's HTTP library, and with it the class, depends on its version
        raise CheckpointError(f"{name} is no local folder, and the hub gives no model of that name: "
                              f"{why_not(error)}; check the name, the network, HF_TOKEN and "
                              "HF_HUB_OFFLINE, or give a path") from error


def is_complete(folder: Path) -> bool:
    """Return whether a model folder has its configuration and all of its weights."""
    index = folder / INDEX_FILE
    files = set(read_json(index).get("weight_map", {}).values()) if index.exists() else {WEIGHTS_FILE}
    return all((folder / file).exists() for file in ("config.json", *files))


def name_of_download(folder: Path) -> Optional[str]:
    """Return `owner/name@commit` of a folder in the hub's cache; None for any other folder."""
    parts = re.search(r"/models--([^/]+)/snapshots/([^/]+)$", str(folder))
    return f"{parts[1].replace('--', '/')}@{parts[2]}" if parts else None
