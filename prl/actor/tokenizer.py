"""A model's tokenizer and chat template, read from its Hugging Face folder without transformers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prl.domains.api import DomainError

_CACHED_PROMPTS = 4096  # the rollouts of a group share their prompt


class ModelTokenizer:
    """Implements `prl.domains.api.Tokenizer`. Encodings of recent texts and conversations are kept."""

    def __init__(self, folder: Path | str) -> None:
        """Raises DomainError naming the file that is missing or broken."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise DomainError(f"{path} is missing; the actors need a model folder with a tokenizer in this form")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself
            raise DomainError(f"{path} is not a tokenizer: {error}") from error
        settings = _json(folder / "tokenizer_config.json")
        self._end_ids = self._find_end_ids(folder, settings)
        self._special_tokens = {
            name: _token_text(value) for name, value in settings.items() if name.endswith("_token") and value is not None
        }
        self._template = _compile(folder, settings)
        self.encode = lru_cache(_CACHED_PROMPTS)(self._encode)
        self._chat = lru_cache(_CACHED_PROMPTS)(self._render)

    @property
    def end_ids(self) -> tuple[int, ...]:
        return self._end_ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        return self._chat(tuple(tuple(message.items()) for message in messages))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _render(self, messages: tuple[tuple[tuple[str, str], ...], ...]) -> tuple[int, ...]:
        if self._template is None:
            raise DomainError("the model's folder has no chat template (chat_template.jinja, or in tokenizer_config.json)")
        conversation = [dict(message) for message in messages]
        try:
            text = self._template.render(messages=conversation, add_generation_prompt=True, **self._special_tokens)
        except jinja2.TemplateError as error:
            raise DomainError(f"the model's chat template refused the conversation: {error}") from error
        return self.encode(text)

    def _find_end_ids(self, folder: Path, settings: Mapping[str, Any]) -> tuple[int, ...]:
        """The tokenizer's eos_token and the model's eos_token_id: what vLLM stops at."""
        ids: list[int] = []
        if settings.get("eos_token") is not None:
            text = _token_text(settings["eos_token"])
            found = self._tokenizer.token_to_id(text)
            if found is None:
                raise DomainError(f"{folder}: eos_token {text!r} of tokenizer_config.json is not in the vocabulary")
            ids.append(found)
        for name in ("generation_config.json", "config.json"):
            value = _json(folder / name).get("eos_token_id")
            if value is not None:
                ids += value if isinstance(value, list) else [value]
                break
        if not ids:
            raise DomainError(f"{folder}: neither tokenizer_config.json nor the model's config names an end-of-text token")
        return tuple(dict.fromkeys(ids))


def _compile(folder: Path, settings: Mapping[str, Any]) -> jinja2.Template | None:
    path = folder / "chat_template.jinja"
    source = path.read_text() if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if source is None:
        return None
    # A template is code from the model's author: the sandbox keeps it from anything but building text.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise DomainError(f"{folder}: the chat template is broken: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _token_text(value: Any) -> str:
    return str(value["content"] if isinstance(value, Mapping) else value)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise DomainError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DomainError(f"{path}: expected an object")
    return value
