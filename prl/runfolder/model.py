"""The run's model folder: a link to a pretrained model, or the config and tokenizer of one that starts from random weights."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from prl.config.hf_config import new_model_config
from prl.trainer.options import ModelOptions

_DIGITS = [*"0123456789", "=", "<eos>", "<pad>", "<unk>", "<unused0>", "<unused1>"]
_BYTES_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_model_folder(options: ModelOptions, folder: Path) -> None:
    """Make `folder`: for a model that lies somewhere a link to it; else, for `init: random` with an architecture, a folder
    in Hugging Face's form with all but the weights. Raises OSError, FileExistsError where it is there already."""
    if options.path:
        folder.symlink_to(Path(options.path).absolute(), target_is_directory=True)
        return
    if options.architecture is None:
        raise ValueError("a model needs a path or, with init: random, an architecture")
    folder.mkdir()
    tokenizer, settings = _digits_tokenizer() if options.tokenizer == "digits" else _bytes_tokenizer()
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")  # its own `save` raises no OSError
    _write(folder / "tokenizer_config.json", {**settings, "model_max_length": options.max_positions})
    ids = tokenizer.get_vocab()
    end, pad = ids[settings["eos_token"]], ids[settings["pad_token"]]
    _write(folder / "config.json", new_model_config(options, end, pad))
    _write(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": pad})


def has_chat_template(options: ModelOptions) -> bool:
    """Whether the model's folder holds, or will hold, a chat template; true where its settings cannot be read."""
    if not options.path:
        return options.tokenizer != "digits"
    folder = Path(options.path)
    try:
        settings = folder / "tokenizer_config.json"
        return (folder / "chat_template.jinja").is_file() or (
            settings.is_file() and bool(json.loads(settings.read_bytes()).get("chat_template"))
        )
    except (OSError, ValueError, AttributeError):
        return True  # whoever reads it says what is wrong


def _digits_tokenizer() -> tuple[Tokenizer, dict[str, Any]]:
    """16 tokens, one a character: the digits are their own ids, "=" is 10, the end of text 11."""
    tokenizer = Tokenizer(models.WordLevel({token: number for number, token in enumerate(_DIGITS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([_special(token) for token in _DIGITS if token.startswith("<")])
    return tokenizer, _settings(eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def _bytes_tokenizer() -> tuple[Tokenizer, dict[str, Any]]:
    """256 bytes and four special tokens; any text goes through unchanged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_special(token) for token in _BYTES_SPECIAL])
    settings = _settings(eos_token="<|im_end|>", pad_token="<|pad|>")
    return tokenizer, {**settings, "chat_template": _CHAT_TEMPLATE}


def _special(token: str) -> AddedToken:
    return AddedToken(token, special=True, normalized=False)


def _settings(**tokens: str) -> dict[str, Any]:
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **tokens}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
