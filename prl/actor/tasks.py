"""The domains that an actor works on, with their problems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prl.domains.api import Context, DomainError, Problem, Tokenizer, Verifier
from prl.domains.options import DomainOptions
from prl.domains.registry import Domain, find_domain, load_split


@dataclass(frozen=True, slots=True)
class Task:
    domain: Domain
    context: Context
    train: Sequence[Problem]
    evaluate: Sequence[Problem]

    def problems(self, kind: str) -> Sequence[Problem]:
        """Problems that leases of this kind ("train" or "evaluate") count through."""
        return self.evaluate if kind == "evaluate" else self.train


def load_tasks(
    domains: Sequence[DomainOptions], seed: int, tokenizer: Tokenizer, verifier: Verifier | None
) -> Mapping[str, Task]:
    """Tasks by their domain's name. Raises DomainError."""
    tasks: dict[str, Task] = {}
    for entry in domains:
        if entry.name in tasks:
            raise DomainError(f"domain {entry.name} is listed twice; give one entry all its files")
        domain = find_domain(entry.name)
        tasks[entry.name] = Task(
            domain=domain,
            context=Context(tokenizer, verifier, entry.options),
            train=load_split(domain, entry.options, "train", seed),
            evaluate=load_split(domain, entry.options, "evaluate", seed),
        )
    return tasks
