"""From YAML and `key=value` overrides to a Config whose every key, type and bound was checked."""

import dataclasses
import io
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError, ScalarToken, YAMLError, scan

from prl.config.bounds import bounds_of, describe, unstated_limit
from prl.config.plain_files import NotPlainError, open_plain
from prl.config.schema import Config
from prl.config.unknown_keys import suggestion

_Problem = tuple[str, str]  # the key, and what is wrong with it in words
_BEGINS, _ENDS = "# written by prl, whole up to the line # end", "# end"  # of a file that `dump` made
SHOWN = 80  # characters of a value, in messages
# Whole words that are numbers in YAML 1.1, and others than they seem.
_BASE_8 = re.compile(r"(?<![\w.:+-])[-+]?0[0-7_]+(?![\w.:])")
_BASE_60 = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


class ConfigError(Exception):
    """What is wrong with a configuration, where, and what to do; each argument is one problem."""

    def __str__(self) -> str:
        return "\n".join(self.args)


def load(path: str | Path, overrides: Sequence[str] = (), sites: Path | None = None) -> Config:
    """Read a YAML file, apply overrides of the form `train.learning_rate=1e-5`, and check every key, type and bound. With
    `sites`, a folder of site profiles, the keys of the one that cluster.profile names count where nothing else is said (a
    run's own config.yaml has them all). Raises ConfigError naming the file, the key and the nearest known key or the bound."""
    path = Path(path)
    try:
        loaded = _sections(path)
        for override in overrides:
            _apply(loaded, override)
        plain = OmegaConf.to_container(_over_profile(loaded, sites) if sites else loaded, resolve=True)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; the configs that come with prl are in configs/") from None
    except NotPlainError as error:
        raise ConfigError(f"{error}; name a YAML file, e.g. configs/quickstart.yaml") from error
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(f"{_source(error.full_key or '', path, overrides)}: {key}{in_words(error)}") from error
    except (OSError, YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {in_words(error)}") from error
    assert isinstance(plain, dict)
    problems: list[_Problem] = []
    config: Config | None = _build(Config, plain, "", problems)
    if config is not None:
        problems = list(_out_of_bounds(config, ""))
    if config is None or problems:
        raise ConfigError(*(f"{_source(key, path, overrides)}: {words}" for key, words in problems))
    return config


def _sections(path: Path) -> DictConfig:
    loaded = read_yaml(path)
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: expected sections such as run: and model:, found a list")
    return loaded


def _over_profile(config: DictConfig, sites: Path) -> DictConfig:
    """The configuration over its site profile: keys of mappings beside each other, any other value in the profile's place."""
    name = OmegaConf.select(config, "cluster.profile")
    if name is None:
        return config
    known = sorted(path.stem for path in sites.glob("*.yaml"))
    path = sites / f"{name}.yaml" if str(name) in known else Path(str(name)).expanduser()
    if not path.is_file():
        raise ConfigError(f"cluster.profile = {name}: no such profile; there are {', '.join(known)}, or name a YAML file")
    profile = _sections(path)
    if set(profile) != {"cluster"}:
        raise ConfigError(f"cluster.profile = {name}: {path} must hold the section cluster: alone, found {', '.join(profile)}")
    problems: list[_Problem] = []
    alone = _build(Config, cast(dict[str, Any], OmegaConf.to_container(profile, resolve=True)), "", problems)
    if alone is not None:
        problems = list(_out_of_bounds(alone, ""))
    if problems:
        raise ConfigError(*(f"{path}: {words}" for _, words in problems))
    merged = OmegaConf.merge(profile, config)
    assert isinstance(merged, DictConfig)
    return merged


def _source(key: str, path: Path, overrides: Sequence[str]) -> str:
    """Where the value of a key stands: in the last override of it, of what it belongs to or of what belongs to it, or else in
    the file."""
    wanted = _parts(key)
    for override in reversed(overrides):
        name, _, text = override.partition("=")
        parts = _parts(name)
        if wanted and wanted[: len(parts)] == parts[: len(wanted)]:
            empty = f" (nothing behind = is null, {name}=\"''\" is empty text)" if not text else ""
            return f"--set {shown(override)}{empty}"
    return str(path)


def _parts(key: str) -> list[str]:
    return [part for part in re.split(r"[.\[\]]", key) if part]


def read_yaml(path: Path) -> DictConfig | ListConfig:
    """Raises OSError, and YAMLError, OmegaConfBaseException, ValueError or RecursionError for what is no YAML, is empty, or was
    cut short: what is left of a run's configuration would be taken with the defaults of the rest."""
    with open_plain(path) as file, io.TextIOWrapper(file, encoding="utf-8") as text:
        content = text.read()
    lines = content.splitlines()
    if lines[:1] == [_BEGINS] and _ENDS not in lines:
        raise YAMLError(f"is cut short, its last line should be {_ENDS}: restore it, e.g. from an attempt_NNN of its run")
    _check_plain_numbers(content)
    found = OmegaConf.load(io.StringIO(content))
    if not found:
        raise YAMLError("is empty: it holds no key")
    return found


def _check_plain_numbers(text: str) -> None:
    """YAML takes 12:00:00 for a number to the base of 60, 43,200, and 010 for 8, which nobody who writes them means: a limit of
    as many minutes would be a month. Raises ValueError where there is one, and YAMLError for what is no YAML."""
    if not (_BASE_8.search(text) or _BASE_60.search(text)):
        return
    for token in scan(text):
        if not (isinstance(token, ScalarToken) and token.plain):
            continue
        for base, pattern in ((8, _BASE_8), (60, _BASE_60)):
            if pattern.fullmatch(token.value):
                raise ValueError(
                    f"YAML takes {token.value} (line {token.start_mark.line + 1}) for a number to the base of {base}; write "
                    f"the number in the key's own unit (a time limit in minutes) without a leading 0, or a text in quotes"
                )


def _apply(tree: DictConfig, override: str) -> None:
    """Set one key; entries of lists go by their number: domains.0.weight=2."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {shown(override)}: write key=value, e.g. run.steps=10 or domains.0.weight=2")
    if re.search(r"^\.|\.\.|\.$", key):
        raise ConfigError(f"--set {shown(override)}: between two dots of a key is nothing; write e.g. domains.0.weight=2")
    if any(re.fullmatch(r"-\d+", part) for part in _parts(key)):
        raise ConfigError(f"--set {shown(override)}: entries of lists are counted from 0, e.g. domains.0.weight=2")
    try:
        _check_plain_numbers(text)
        value = OmegaConf.from_dotlist([f"value={text}"])["value"]
    except (OmegaConfBaseException, YAMLError, TypeError, ValueError) as error:
        refers = "; here ${oc.env:NAME} alone can be put, a variable of the environment; other keys only in the file"
        raise ConfigError(f"--set {shown(override)}: {in_words(error)}{refers * ('${' in text)}") from error
    try:
        OmegaConf.update(tree, key, value, force_add=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"--set {shown(override)}: {in_words(error)}") from error
    except IndexError:
        raise ConfigError(f"--set {shown(override)}: the list has no such entry; they are counted from 0") from None
    except (TypeError, ValueError):
        raise ConfigError(f"--set {shown(override)}: a list's entries go by number, from 0: domains.0.weight=2") from None


def shown(value: Any) -> str:
    """A value as a message quotes it: not at any length."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out whole numbers of up to 4300 digits
        return "(a number of thousands of digits)"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}... ({len(text)} characters)"


def in_words(error: Exception) -> str:
    """What an error says to whoever wrote a configuration, not to a programmer."""
    if isinstance(error, OmegaConfBaseException):
        return str(error).partition("\n")[0]  # behind it come omegaconf's own objects
    if isinstance(error, ValueError):
        return f"a value cannot be read: {str(error).partition('; use sys.')[0]}"
    if isinstance(error, MarkedYAMLError) and error.problem and error.problem_mark:  # its own words take several lines
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: is no YAML: {error.problem}"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}; have its owner permit it (chmod), or name another file"
    return " ".join(str(error).split())


def out_of_bounds(config: Config) -> list[str]:
    """A line for each value out of the bounds in its option's annotation or of its unit, with key, value and bounds."""
    return [words for _, words in _out_of_bounds(config, "")]


def _out_of_bounds(options: Any, where: str) -> Iterator[_Problem]:
    hints = get_type_hints(type(options), include_extras=True)
    for field in dataclasses.fields(options):
        value, name = getattr(options, field.name), f"{where}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _out_of_bounds(value, f"{name}.")
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                if dataclasses.is_dataclass(item):
                    yield from _out_of_bounds(item, f"{name}[{number}].")
        elif isinstance(value, float) and not math.isfinite(value):
            yield name, f"{name} = {shown(value)}: must be a finite number"
        elif isinstance(value, int | float):
            bounds, limit = bounds_of(hints[field.name]), unstated_limit(field.name, hints[field.name])
            if not all(bound.holds(value) for bound in bounds):
                yield name, f"{name} = {shown(value)}: must be {describe(bounds)}"
            elif limit is not None and value >= limit:
                yield name, f"{name} = {shown(value)}: must be below {limit}"


def dump(config: Config) -> str:
    """YAML of every key, defaults included; `load` gives the same Config back, and tells where the end is missing."""
    return f"{_BEGINS}\n{OmegaConf.to_yaml(OmegaConf.create(_plain(config)))}{_ENDS}\n"


def replace(config: Config, **sections: Mapping[str, Any]) -> Config:
    """A Config with some keys of some sections changed: replace(config, run={"folder": "runs/a"})."""
    changed = {name: dataclasses.replace(getattr(config, name), **keys) for name, keys in sections.items()}
    return dataclasses.replace(config, **changed)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _build(cls: type, values: Mapping[Any, Any], where: str, problems: list[_Problem]) -> Any:
    """An instance of the options class `cls`; problems found on the way are appended, and None stands for a broken one."""
    hints = get_type_hints(cls)
    before = len(problems)
    arguments = {}
    for key, value in values.items():
        name = f"{where}{key}"
        if key not in hints:
            problems.append((name, f"unknown key {name}; {suggestion(cls, key, value, where)}"))
            continue
        arguments[key] = _convert(hints[key], value, name, problems)
    for field in dataclasses.fields(cls):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            problems.append((f"{where}{field.name}", f"{where}{field.name} is missing"))
    return cls(**arguments) if len(problems) == before else None


def _convert(kind: Any, value: Any, name: str, problems: list[_Problem]) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _convert(arguments[0], value, name, problems)
    if origin in (Union, types.UnionType):
        return _convert_union(arguments, value, name, problems)
    if origin is Literal:
        if value not in arguments:
            problems.append((name, f"{name}: expected one of {', '.join(map(str, arguments))}; found {shown(value)}"))
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if isinstance(value, Mapping):
            return _build(kind, value, f"{name}.", problems)
        problems.append((name, f"{name}: expected keys and values, found {_kind(value)}"))
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return tuple(_convert(arguments[0], item, f"{name}[{i}]", problems) for i, item in enumerate(value))
        problems.append((name, f"{name}: expected a list, found {_kind(value)}"))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        if isinstance(value, Mapping):
            return {str(key): _convert(arguments[1], item, f"{name}.{key}", problems) for key, item in value.items()}
        problems.append((name, f"{name}: expected keys and values, found {_kind(value)}"))
    elif kind is Any:
        return value
    elif kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            problems.append((name, f"{name} = {shown(value)}: is too large for a number"))
    elif isinstance(kind, type) and isinstance(value, kind) and not (kind is not bool and isinstance(value, bool)):
        return value
    else:
        problems.append((name, f"{name}: expected {_type_name(kind)}, found {_found(value)}"))
    return None


def _convert_union(kinds: Sequence[Any], value: Any, name: str, problems: list[_Problem]) -> Any:
    if value is None and types.NoneType in kinds:
        return None
    exact = next((kind for kind in kinds if type(value) is kind), None)
    candidates = [exact] if exact else [kind for kind in kinds if kind is not types.NoneType]
    for kind in candidates:
        trial: list[_Problem] = []
        converted = _convert(kind, value, name, trial)
        if not trial:
            return converted
    if len(candidates) == 1:
        problems.extend(trial)
    else:
        expected = " or ".join(_type_name(kind) for kind in kinds)
        problems.append((name, f"{name}: expected {expected}, found {_found(value)}"))
    return None


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", types.NoneType: "null"}


def _type_name(kind: Any) -> str:
    return _NAMES.get(kind, str(kind))


def _found(value: Any) -> str:
    """What stands there, as YAML writes it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{_kind(value)} {shown(value)}"


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "keys and values"
    if isinstance(value, list):
        return "a list"
    return _NAMES.get(type(value), type(value).__name__)
