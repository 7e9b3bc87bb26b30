"""Finds a domain by its name, checks that it is complete, and loads its problems."""

import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import prl.domains
from prl.config.schema import Config
from prl.domains.api import DomainError, GenerateRollout, Problem, ScoreGroup
from prl.runfolder.model import has_chat_template

MATHEMATICS = "math_verify"  # what the verifier's workers import
_ARGUMENTS = {  # that a domain's functions are called with, by their place
    "load_problems": ("options", "split", "seed"),
    "generate_rollout": ("problem", "sampler", "context"),
    "score_group": ("problem", "rollouts", "context"),
    "check_options": ("options",),
    "has_held_out": ("options",),
}
_NEEDED = ("load_problems", "generate_rollout")
RAISED = (Exception, SystemExit)  # by a domain's own code, which may try to end the program


@dataclass(frozen=True, slots=True)
class Domain:
    """A domain's functions; see prl.domains.api."""

    name: str
    load_problems: Callable[[Mapping[str, Any], str, int], Sequence[Problem]]
    generate_rollout: GenerateRollout
    score_group: ScoreGroup | None
    check_options: Callable[[Mapping[str, Any]], None] | None
    has_held_out: Callable[[Mapping[str, Any]], bool] | None
    needs_verifier: bool
    module: str = ""  # whole name


def find_domain(name: str) -> Domain:
    """The domain prl.domains.<name>, or else the importable module of that (dotted) name. Raises DomainError naming what is
    missing; an error while the module is imported is its cause."""
    module = _import(name)
    for function in _NEEDED:
        if not callable(getattr(module, function, None)):
            raise DomainError(
                f"domain {name} ({module.__file__}) has no function {function}; prl.domains.api says what a domain is made of"
            )
    for function in ("generate_rollout", "score_group"):
        if hasattr(module, function) and not inspect.iscoroutinefunction(getattr(module, function)):
            raise DomainError(f"domain {name} ({module.__file__}): {function} must be an `async def`")
    for function, arguments in _ARGUMENTS.items():
        if hasattr(module, function) and not _takes(getattr(module, function), arguments):
            raise DomainError(f"domain {name} ({module.__file__}): {function} must take ({', '.join(arguments)})")
    return Domain(
        name=name,
        load_problems=module.load_problems,
        generate_rollout=module.generate_rollout,
        score_group=getattr(module, "score_group", None),
        check_options=getattr(module, "check_options", None),
        has_held_out=getattr(module, "has_held_out", None),
        needs_verifier=bool(getattr(module, "NEEDS_VERIFIER", False)),
        module=module.__name__,
    )


def check_domain(name: str, options: Mapping[str, Any]) -> Domain:
    """The domain. Raises DomainError where it is not there, or refuses the options. Loads no problems."""
    domain = find_domain(name)
    if domain.check_options is not None:
        with _told(f"domain {name}: check_options failed"):
            domain.check_options(options)
    return domain


def domain_problems(config: Config) -> list[str]:
    """A line for each thing that keeps a run from starting with its domains: modules, options, and what they need of the run.
    Loads no problems."""
    problems, checked, held_out = [], True, False
    numbers: dict[str, int] = {}  # by module
    for number, entry in enumerate(config.domains):
        try:
            domain = check_domain(entry.name, entry.options)
            held_out = _has_held_out(domain, entry.options) or held_out
        except DomainError as error:
            problems.append(f"domains[{number}]: {error}")
            checked = False
            continue
        first = numbers.setdefault(domain.module, number)
        if first != number and config.domains[first].name != entry.name:  # equal names are told by prl.config.checks
            problems.append(
                f"domains[{number}].name = {entry.name}: is the task of domains[{first}], {config.domains[first].name}; name a "
                f"task once, with all its data and its weight"
            )
        if domain.needs_verifier and not config.verifier.processes:
            problems.append(f"verifier.processes = 0: domain {entry.name} needs the verifier; set at least 1")
        if domain.needs_verifier and config.cluster.nodes is None and find_spec(MATHEMATICS) is None:
            problems.append(
                f"domains[{number}]: domain {entry.name} has its answers checked by {MATHEMATICS}, which is not installed "
                f"here: pip install math-verify, or in a checkout bash tools/setup.sh --dev"
            )
        if _asks_for_chat(domain) and not has_chat_template(config.model):
            problems.append(
                f"domains[{number}]: domain {entry.name} builds its prompts with the model's chat template "
                f"(context.tokenizer.chat), and the model has none: set model.tokenizer: bytes, or name a model.path whose "
                f"folder has one (chat_template.jinja, or in tokenizer_config.json)"
            )
    every = config.run.evaluate_every_steps
    if every and checked and not held_out:
        problems.append(
            f"run.evaluate_every_steps = {every}: no domain has held-out problems; give a domain some (for gsm8k "
            f"options.evaluate_paths), or set 0"
        )
    return problems


def _has_held_out(domain: Domain, options: Mapping[str, Any]) -> bool:
    if domain.has_held_out is None:
        return True
    with _told(f"domain {domain.name}: has_held_out failed"):
        return domain.has_held_out(options)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Whatever a domain's own function raises becomes a DomainError."""
    try:
        yield
    except DomainError:
        raise
    except RAISED as error:
        raise DomainError(f"{what}: {type(error).__name__}: {error}") from error


def _asks_for_chat(domain: Domain) -> bool:
    """Whether the domain's module, as it is written, uses the chat template."""
    try:
        return "tokenizer.chat(" in inspect.getsource(inspect.getmodule(domain.generate_rollout) or inspect)
    except (OSError, TypeError):
        return False


def load_split(domain: Domain, options: Mapping[str, Any], split: str, seed: int) -> Sequence[Problem]:
    """The problems of a split. Raises DomainError where they cannot be loaded, are no sequence of Problem, or none to
    train on."""
    try:
        problems = domain.load_problems(options, split, seed)
    except RAISED as error:
        words = str(error) if isinstance(error, DomainError) else f"{type(error).__name__}: {error}"
        raise DomainError(f"domain {domain.name}: load_problems failed (split {split}): {words}") from error
    if not isinstance(problems, Sequence) or not all(isinstance(problem, Problem) for problem in problems):
        raise DomainError(f"domain {domain.name}: load_problems must return a sequence of Problem (split {split})")
    if split == "train" and not problems:
        raise DomainError(
            f"domain {domain.name}: load_problems found no problems to train on, with the options {dict(options)}; name data "
            f"that has some, or leave the domain out"
        )
    return problems


def _import(name: str) -> Any:
    own = f"{prl.domains.__name__}.{name}"
    for candidate in (own, name) if all(part.isidentifier() for part in name.split(".")) else ():
        try:
            return importlib.import_module(candidate)
        except RAISED as error:
            if isinstance(error, ModuleNotFoundError) and f"{candidate}.".startswith(f"{error.name}."):
                continue  # the module itself is not there, or a package that it would be in
            raise DomainError(
                f"domain {name}: importing {candidate} failed{_place(error)}: {type(error).__name__}: {error}"
            ) from error
    raise DomainError(
        f"there is no domain {name}: it is none of prl's ({', '.join(_own_domains())}) "
        f"and no module {name} can be imported (is its folder on PYTHONPATH?)"
    )


def _takes(function: Callable[..., Any], arguments: Sequence[str]) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a function in C may not say what it takes
        return True
    return True


def _place(error: BaseException) -> str:
    """The line that raised it; nothing where none of a file did, or where the error names the line itself (a SyntaxError)."""
    if isinstance(error, SyntaxError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _own_domains() -> list[str]:
    helpers = {"api", "answers", "options", "registry", "rows", "settings"}
    return sorted(module.name for module in pkgutil.iter_modules(prl.domains.__path__) if module.name not in helpers)
