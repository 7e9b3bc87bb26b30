"""Options of a run as a whole: how long, how fresh, when to look, when to stop."""

from dataclasses import dataclass
from typing import Annotated, Literal

from prl.config.bounds import Above, AtLeast, Below


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    name: Annotated[str, "name of the run; also the Slurm job's name"] = "prl"
    id: Annotated[
        str, "tells this run's files from those of another run of its name; drawn by prl-submit when a run begins"
    ] = ""
    folder: Annotated[str, "run folder on the shared filesystem; default: runs/<name>"] = ""
    share: Annotated[
        Literal["owner", "group"],
        "who may look into the run folder; owner: nobody else; group: all of its Unix group read it (not the token, by which "
        "the run's processes know each other), and may ask for a checkpoint or the end by control/SAVE and control/STOP",
    ] = "owner"
    replay: Annotated[
        str, "run folder that is trained on again, without samplers and actors; what prl-submit --replay sets"
    ] = ""
    replay_from: Annotated[
        Literal["steps", "rollouts"],
        "steps: on its step files as they are; rollouts: on steps built anew from its rollouts, by this run's preprocess",
    ] = "steps"
    seed: Annotated[int, "governs initial weights and problem order", AtLeast(0)] = 1
    steps: Annotated[int, "optimizer steps to train", AtLeast(1)] = 100
    mode: Annotated[
        Literal["pipeline", "conventional"],
        "pipeline: sample and train at once; conventional: generate, stop, train, stop",
    ] = "pipeline"
    max_lag: Annotated[int, "oldest version that may be trained on, in optimizer steps (pipeline)", AtLeast(0)] = 4
    steps_per_generation: Annotated[int, "optimizer steps trained on one generation (conventional)", AtLeast(1)] = 4
    groups_per_step: Annotated[int, "groups (problems) trained on in one optimizer step", AtLeast(1)] = 32
    rollouts_per_group: Annotated[int, "rollouts sampled for one problem", AtLeast(1), Below(2**16)] = 16
    min_rollouts_per_group: Annotated[
        int | None,
        "where some rollouts of a group fail or are late, so many of them are enough to train on; null: all",
        AtLeast(1),
    ] = None
    group_deadline_s: Annotated[
        float | None,
        "a group that was handed out so many seconds ago and has not come back is sampled again by another actor; null: never",
        Above(0),
    ] = None
    max_waiting_mib: Annotated[
        int | None,
        "pipeline: MiB of rollouts that wait to be trained above which no new groups are handed out; null: no limit",
        AtLeast(1),
    ] = 4096
    epochs: Annotated[
        int | None, "end the run once every problem was handed out so many times; null: go through them without end", AtLeast(1)
    ] = None
    order: Annotated[
        Literal["arrival", "dispatch"],
        "arrival: train on groups as they end; dispatch: in the order in which they were handed out",
    ] = "arrival"
    evaluate_every_steps: Annotated[int, "steps between two evaluations on held-out problems; 0: never", AtLeast(0)] = 0
    evaluate_problems: Annotated[int, "held-out problems, one sampled answer each", AtLeast(1)] = 512
    stop_at_reward: Annotated[float | None, "end when evaluations reach this mean reward; null: train all steps"] = None
    stop_after_evaluations: Annotated[int, "evaluations in a row that must reach stop_at_reward", AtLeast(1)] = 2

    @property
    def mark(self) -> str:
        """What the files of the run's streams say of whose they are."""
        return f"{self.name}-{self.id}" if self.id else self.name

    @property
    def lag_limit(self) -> int:
        """Oldest version that may be trained on, in optimizer steps, in either mode."""
        return self.max_lag if self.mode == "pipeline" else self.steps_per_generation - 1
