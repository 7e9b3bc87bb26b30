"""Options of the tasks that are trained on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from prl.config.bounds import Above, AtMost


@dataclass(frozen=True, kw_only=True)
class DomainOptions:
    name: Annotated[
        str, "a domain of prl.domains (digits, gsm8k), or a module of your own with load_problems and generate_rollout"
    ]
    weight: Annotated[float, "share of the groups drawn from this domain, relative to the others'", Above(0), AtMost(1e6)] = 1.0
    options: Annotated[Mapping[str, Any], "handed to the domain's load_problems and generate_rollout"] = field(
        default_factory=dict
    )
