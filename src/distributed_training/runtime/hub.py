"""The Hugging Face Hub as others meet it: the token, and what its library raises as one line that says what to do.

The token is taken from the environment or .env and handed to the library; no message of ours holds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from distributed_training.config.load import secret
from distributed_training.runtime.errors import DistributedTrainingError, HubError

_TOKEN = "set HF_TOKEN in the environment or in .env (huggingface.co/settings/tokens)"
_UNREACHABLE = ("ConnectError", "ConnectTimeout", "ConnectionError", "ReadTimeout", "ProxyError", "Timeout")


def hub_token() -> str | None:
    """The token of the Hub's user. None leaves it to the library, which knows of an earlier `hf auth login`."""
    return secret("HF_TOKEN")


def without_token(text: str) -> str:
    """A text that is to be shown, with the token blotted out should it be in there."""
    token = hub_token()
    return text.replace(token, "***") if token else text


@contextmanager
def hub_errors(what: str, kind: type[DistributedTrainingError] = HubError) -> Iterator[None]:
    """Turn what goes wrong between here and the Hub into one line about `what`; all else passes."""
    try:
        yield
    except DistributedTrainingError:
        raise
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise kind(without_token(f"{what}: {reason}")) from None


def _reason(error: BaseException) -> str | None:
    """What happened and what to do; None where it has nothing to do with the Hub."""
    chain = list(_chain(error))
    names = {kind.__name__ for one in chain for kind in type(one).__mro__}
    texts = " ".join(str(one) for one in chain)
    status = next((s for one in chain if (s := _status(one)) is not None), None)
    if "GatedRepoError" in names:
        return f"its owner wants to be asked first: accept the conditions on its page, then {_TOKEN}"
    offline = "OfflineModeIsEnabled" in " ".join([*names, texts])  # of `datasets`, only the text of an error says it
    if offline or ("LocalEntryNotFoundError" in names and "offline" in texts.lower()):
        return (
            "HF_HUB_OFFLINE is set, and it is not in the cache here; unset it to use the network, or give the path of "
            "a folder"
        )
    if "RepositoryNotFoundError" in names or status in (401, 404):
        return f"the Hub has no such repository, or it is private; check the name, and for a private one {_TOKEN}"
    if status == 403:
        return f"the Hub forbids it to this token; use one that may write there: {_TOKEN}"
    if "RevisionNotFoundError" in names:
        return "the repository has no such revision"
    if names & set(_UNREACHABLE) or "LocalEntryNotFoundError" in names:
        return (
            "the Hub cannot be reached, and it is not in the cache here; check the network (HTTPS_PROXY, HF_ENDPOINT), "
            "or give the path of a folder"
        )
    if status is not None:
        return f"the Hub answers {status}: {' '.join(str(error).split())[:300]}"
    return None


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of the Hub's library carries."""
    if not any(kind.__name__ == "HfHubHTTPError" for kind in type(error).__mro__):
        return None
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it came from: transformers wraps what the Hub's library says in one of its own."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
