"""How many bytes of a version each rank, lane and link of a plan carries, and how long that takes at least. Free of torch."""

from dataclasses import dataclass

from prl.weights.plan import LanePlan, lane_buckets, schedule


@dataclass(frozen=True)
class Traffic:
    """Bytes of one version. What lanes get is more than the model where workers hold the same; several samplers get the same
    bytes at once."""

    roots: tuple[int, ...]  # by trainer rank
    lanes: tuple[int, ...]
    links: dict[tuple[int, int], int]  # by root and lane

    def floor_s(self, bytes_per_s: float) -> float:
        """No transfer is shorter where each rank and each worker has a link of this speed."""
        return max(*self.roots, *self.lanes) / bytes_per_s


def traffic(plan: LanePlan) -> Traffic:
    roots, lanes = [0] * plan.trainer_ranks, [0] * plan.lanes
    links = {(leg.root, leg.lane): plan.leg_bytes(leg) for leg in plan.legs}
    for (root, lane), size in links.items():
        roots[root] += size
        lanes[lane] += size
    return Traffic(tuple(roots), tuple(lanes), links)


def scheduled_s(plan: LanePlan, bucket_bytes: int, bytes_per_s: float) -> float:
    """How long the plan's order of transfers takes on such links, each of which carries one bucket at a time."""
    sizes = {
        (leg.root, leg.lane): [sum(map(plan.tile_bytes, tiles)) for tiles in lane_buckets(plan, leg, bucket_bytes)]
        for leg in plan.legs
    }
    root_s, lane_s = [0.0] * plan.trainer_ranks, [0.0] * plan.lanes
    for root, lane, number in schedule(plan, bucket_bytes):
        end_s = max(root_s[root], lane_s[lane]) + sizes[root, lane][number] / bytes_per_s
        root_s[root] = lane_s[lane] = end_s
    return max(lane_s)
