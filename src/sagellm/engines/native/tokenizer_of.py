"""From a configuration and a model's folder to the tokenizer. Imports no torch: a front has no need of it."""

from __future__ import annotations

from pathlib import Path

from sagellm.core.config import Config
from sagellm.core.errors import ConfigError
from sagellm.core.files import read_text
from sagellm.engines.native.tokenizer import Tokenizer


def tokenizer_of(config: Config, folder: Path) -> Tokenizer:
    """The tokenizer in the folder; raises `ModelError`.

    Its chat template is the configured one, or else the model's.
    """
    return Tokenizer.from_folder(
        folder,
        chat_template=_chat_template(config),
        special_in_messages=config.model.special_tokens_in_messages,
    )


def _chat_template(config: Config) -> str | None:
    path = config.model.chat_template
    try:
        return None if path is None else read_text(Path(path).expanduser())
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(
            f"model.chat_template: {path} cannot be read ({reason}): give a Jinja file"
        ) from error
