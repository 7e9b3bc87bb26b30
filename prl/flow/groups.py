"""Which complete groups make up the next step."""

from typing import Literal


class GroupQueue:
    """Numbers of the groups that wait to be trained. `arrival`: taken as they came; `dispatch`: in the order in which they were
    handed out, none before all lower numbers have come or ended (see the dispatcher's `awaited_from`)."""

    def __init__(self, order: Literal["arrival", "dispatch"]) -> None:
        self.order = order
        self._waiting: dict[int, None] = {}  # in the order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, group: int) -> None:
        self._waiting.setdefault(group)

    def remove(self, group: int) -> None:
        """Trained, discarded, or issued again."""
        self._waiting.pop(group, None)

    def in_order(self, awaited_from: int | None = None) -> list[int]:
        """The groups that may be taken now, first come first; with `dispatch` those below `awaited_from`."""
        if self.order == "arrival":
            return list(self._waiting)
        if awaited_from is None:
            raise ValueError("order dispatch needs to know from which group on results are awaited")
        return sorted(g for g in self._waiting if g < awaited_from)
