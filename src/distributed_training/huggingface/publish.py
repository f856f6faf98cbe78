"""A folder of a model to the Hugging Face Hub. What can go wrong is looked for before anything is sent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from distributed_training.runtime.errors import ConfigError, HubError
from distributed_training.runtime.hub import hub_errors, hub_token
from distributed_training.runtime.imports import require

_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}|[\w.-]{1,96}")
_NEVER = ["checkpoints/*", "*.jsonl", ".env", "*.tmp"]  # not part of a model, whatever lies in the folder


def push(folder: str | Path, repo: str, *, private: bool = False, message: str = "Upload model") -> str:
    """Upload a folder that `save` made; gives its address on the Hub.

    Args:
        folder: the model's files, with a README.md as its card.
        repo: `user/name`, made if it is not there. Files of the same name are replaced.
        private: only the user and their organisation see it; where the repository exists already it stays as it is.
        message: what the commit says.
    """
    folder = Path(folder)
    if not folder.is_dir() or not any(folder.iterdir()):
        raise HubError(f"{folder}: there is nothing to push; write a model there first")
    api = check_ready(repo)
    with hub_errors(f"{repo} on {api.endpoint}"):
        address = api.create_repo(repo, private=private, exist_ok=True)
        found = getattr(address, "repo_id", repo)  # with the user's name in front, if that was left out
        api.upload_folder(repo_id=found, folder_path=folder, commit_message=message, ignore_patterns=_NEVER)
    return str(address)


def check_ready(repo: str) -> Any:
    """The Hub's API with the user's token, or an error that says what is missing. Sends nothing."""
    if not _NAME.fullmatch(repo):
        raise ConfigError(f"{repo!r} is no name of a repository on the Hub: give user/name, of letters, digits, . _ -")
    hub = require("huggingface_hub", "hf", "pushing to the Hub")
    if require("huggingface_hub.constants", "hf", "pushing to the Hub").HF_HUB_OFFLINE:
        raise HubError(f"{repo}: HF_HUB_OFFLINE is set, so that nothing can be pushed; unset it first")
    token = hub_token() or hub.get_token()
    if not token:
        raise HubError(
            f"{repo}: pushing needs a token that may write: set HF_TOKEN in the environment or in .env, or run "
            "`hf auth login` (huggingface.co/settings/tokens)"
        )
    return hub.HfApi(token=token)
