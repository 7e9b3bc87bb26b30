"""How long others may be silent before they count as lost, where whoever listens was held up itself and could not hear them."""


class Patience:
    """Pure: it is told when it was held up, and at what time it is asked."""

    def __init__(self, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._held_up: list[tuple[float, float]] = []  # when a hold-up ended, and how long it was

    def held_up(self, seconds: float, now_s: float) -> None:
        self._held_up.append((now_s, seconds))

    def limit_s(self, now_s: float) -> float:
        """The silence that counts. Longer by the hold-ups of the last `lost_after_s`: after one there is as much time to
        be heard as ever; yet at most about twice as long, however often they come."""
        self._held_up = [(ended_s, seconds) for ended_s, seconds in self._held_up if now_s - ended_s < self._lost_after_s]
        return self._lost_after_s + sum(seconds for _, seconds in self._held_up)
