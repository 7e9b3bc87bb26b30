"""Loading: every key known, every type right, every message naming the key and the way out."""

import dataclasses
import os
import re
import subprocess
import sys
from typing import get_args, get_type_hints

import pytest

from prl.config.bounds import bounds_of
from prl.config.load import ConfigError, dump, load, out_of_bounds, replace
from prl.config.schema import Config

GOOD = """
run: {steps: 10, stop_at_reward: 1}
train: {learning_rate: 1e-3}
domains: [{name: digits, weight: 2, options: {sizes: [1, 2], note: hello}}]
cluster: {sbatch: {exclusive: true, mem: 10, constraint: h100}}
"""


def written(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return path


def test_values_keep_their_types(tmp_path):
    config = load(written(tmp_path, GOOD))
    assert config.run.steps == 10
    assert config.run.stop_at_reward == 1.0
    assert isinstance(config.run.stop_at_reward, float)
    assert config.train.learning_rate == 1e-3  # YAML 1.1 alone would read text here
    assert config.domains[0].options == {"sizes": [1, 2], "note": "hello"}
    assert config.cluster.sbatch == {"exclusive": True, "mem": 10, "constraint": "h100"}
    assert config.cluster.nodes is None


def test_a_written_configuration_that_was_cut_short_anywhere_is_refused_with_its_name(tmp_path):
    """Most of what is left of it is valid YAML, and the defaults would take the place of the rest."""
    text = dump(load(written(tmp_path, GOOD)))
    for length in range(0, len(text) - 1, 61):
        path = written(tmp_path, text[:length])
        with pytest.raises(ConfigError, match=f"^{path}: ") as caught:
            load(path)
    assert "is cut short, its last line should be # end: restore it" in str(caught.value)
    assert load(written(tmp_path, text + "# a person's note\n")).run.steps == 10


def test_dump_and_load_give_the_same_config(tmp_path):
    config = load(written(tmp_path, GOOD))
    assert load(written(tmp_path, dump(config))) == config


def test_overrides_come_last(tmp_path):
    config = load(written(tmp_path, GOOD), ["run.steps=7", "train.loss=reinforce"])
    assert (config.run.steps, config.train.loss) == (7, "reinforce")
    assert replace(config, run={"folder": "x"}).run.folder == "x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run: {stepz: 1}", "unknown key run.stepz; did you mean run.steps?"),
        ("trian: {}", "unknown key trian; did you mean train?"),
        ("slurm: {}", "unknown key slurm; did you mean cluster?"),
        (
            "slurm: {extra: {constraint: a}, partitoin: b, qos: c, zz: 1}",
            "unknown key slurm; did you mean cluster? slurm.extra is cluster.sbatch, slurm.partitoin is cluster.partition, "
            "slurm.qos is cluster.qos",
        ),
        ("cluster: {extra: {constraint: a}}", "unknown key cluster.extra; did you mean cluster.sbatch?"),
        ("cluster: {mem: 3}", "unknown key cluster.mem; did you mean cluster.memory_per_node_gib?"),
        ("xyz: {}", "unknown key xyz; known keys here: run, model, domains, train, sample, actor, "),
        ("run: {steps: many}", "run.steps: expected a whole number, found text 'many'"),
        ("run: {steps: 1.5}", "run.steps: expected a whole number, found a number 1.5"),
        ("run: {steps: true}", "run.steps: expected a whole number, found true"),
        ("run: {stop_at_reward: high}", "run.stop_at_reward: expected a number, found text 'high'"),
        ("run: {mode: both}", "run.mode: expected one of pipeline, conventional; found 'both'"),
        ("run: 3", "run: expected keys and values, found a whole number"),
        ("domains: digits", "domains: expected a list, found text"),
        ("domains: [{weight: 1}]", "domains[0].name is missing"),
        ("domains: [{name: digits, wieght: 1}]", "unknown key domains[0].wieght; did you mean domains[0].weight?"),
        ("cluster: {sbatch: {mem: [1]}}", "cluster.sbatch.mem: expected"),
        ("run: {steps: null}", "run.steps: expected a whole number, found null"),
        ("[1, 2]", "expected sections such as run: and model:, found a list"),
        ("run: {steps: [", "config.yaml"),
        ('run: {steps: "${nothing}"}', "nothing"),
    ],
)
def test_bad_input_names_the_key(tmp_path, text, expected):
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, text))
    assert expected in str(caught.value)


def test_overrides_reach_into_lists(tmp_path):
    config = load(written(tmp_path, GOOD), ["domains.0.weight=3", "domains.0.options.sizes=[4,5]", "domains.0.options.limit=7"])
    assert config.domains[0].weight == 3.0
    assert config.domains[0].options == {"sizes": [4, 5], "note": "hello", "limit": 7}


@pytest.mark.parametrize(
    "override",
    [
        "domains.7.weight=1",
        "run..steps=1",
        ".=1",
        ".run=1",
        "run.=1",
        "domains.-1.name=x",
        "domains[-1].name=x",
        "domains.first.weight=1",
        "=1",
        "run.steps=[1",
    ],
)
def test_overrides_that_do_not_fit_are_named(tmp_path, override):
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, GOOD), [override])
    assert override in str(caught.value)


@pytest.mark.parametrize("key", ["domains.first.weight", "domains.name", "domains[x]"])
def test_an_entry_of_a_list_that_is_named_and_not_numbered_is_told_as_that(tmp_path, key):
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, GOOD), [f"{key}=1"])
    assert str(caught.value) == f"--set '{key}=1': a list's entries go by number, from 0: domains.0.weight=2"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("9" * 400, f"train.learning_rate = {'9' * 80}... (400 characters): is too large for a number"),
        (
            "9" * 5000,
            "a value cannot be read: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits",
        ),
        ("0x" + "f" * 5000, "train.learning_rate = (a number of thousands of digits): is too large for a number"),
        ("x" * 5000, f"train.learning_rate: expected a number, found text '{'x' * 79}... (5002 characters)"),
    ],
)
def test_values_of_any_length_are_quoted_shortly(tmp_path, value, words):
    path = written(tmp_path, f"train: {{learning_rate: {value}}}")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {words}"
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, GOOD), [f"train.learning_rate={value}"])
    assert str(caught.value).endswith(words)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run: {~: 1}", "run: Incompatible key type 'NoneType'"),
        ('run: {name: "${nothing}"}', "run.name: Interpolation key 'nothing' not found"),
    ],
)
def test_what_omegaconf_says_of_itself_is_left_out(tmp_path, text, words):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == f"{path}: {words}"


def test_what_values_may_refer_to(tmp_path, monkeypatch):
    monkeypatch.setenv("SWEEP", "a")
    assert load(written(tmp_path, GOOD), ["run.name=x-${oc.env:SWEEP}"]).run.name == "x-a"
    both = written(tmp_path, 'run: {seed: 3, name: "x-${run.seed}"}')
    assert load(both).run.name == "x-3"
    assert load(both, ["run.seed=4"]).run.name == "x-4"
    with pytest.raises(
        ConfigError, match=r"^--set 'run.name=\$\{run.seed\}': Interpolation key 'run.seed' not found; here \$\{oc"
    ):
        load(both, ["run.name=${run.seed}"])
    with pytest.raises(ConfigError, match=r"^--set 'run.name=\$\{oc.env:NONE_OF_THIS_NAME\}': .* other keys only in the file$"):
        load(both, ["run.name=${oc.env:NONE_OF_THIS_NAME}"])


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(ConfigError, match=f"^{path}: is no regular file; name a YAML file"):
            load(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run:\n\tsteps: 3\n", "line 2, column 1: is no YAML: found character that cannot start any token"),
        ("run: {steps: 1}\nrun: {steps: 2}\n", "line 2, column 1: is no YAML: found duplicate key run"),
        ("run: {}\n---\nrun: {}\n", "line 2, column 1: is no YAML: but found another document"),
        ("run: !!python/name:os.system", "line 1, column 6: is no YAML: could not determine a constructor for the tag "),
        ("run: {name: a\0b}", "control characters are not allowed"),
    ],
)
def test_what_is_no_yaml_is_told_in_one_line_with_its_place(tmp_path, text, words):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_time_and_leading_zeros_are_not_taken_for_numbers_to_another_base(tmp_path):
    """12:00:00 would be a limit of 43,200 minutes, 010 one of 8."""
    words = "YAML takes 12:00:00 (line 2) for a number to the base of 60; write the number in the key's own unit"
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(written(tmp_path, "cluster:\n  time_min: 12:00:00\n"))
    good = written(tmp_path, "run: {name: '12:00:00'} # 12:00:00\ncluster: {setup: [echo 1:30, a 12:00:00]}\n")
    for key in ("cluster.time_min=1:30", "cluster.environment={A: -1:30.5}"):
        with pytest.raises(ConfigError, match=r"^--set .*: a value cannot be read: YAML takes -?1:30"):
            load(good, [key])
    with pytest.raises(ConfigError, match=r"YAML takes 010 \(line 1\) for a number to the base of 8"):
        load(good, ["cluster.nodes=010"])
    config = load(good, ["cluster.environment={A: '1:30', B: n1:30, C: 0, D: 0.05, E: '010', F: 1-01, G: 0x10}"])
    texts = {"A": "1:30", "B": "n1:30", "E": "010", "F": "1-01"}
    assert (config.run.name, config.cluster.environment) == ("12:00:00", texts | {"C": 0, "D": 0.05, "G": 16})
    assert load(written(tmp_path, dump(config))) == config


def test_a_file_that_cannot_be_read_is_told_once(tmp_path):
    written(tmp_path, GOOD)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "config.yaml" / "under.yaml")
    assert str(caught.value).startswith(f"{tmp_path}/config.yaml/under.yaml: cannot be read: Not a directory; ")
    with pytest.raises(ConfigError, match=r"^x{300}: cannot be read: File name too long; "):
        load("x" * 300)


def test_all_problems_come_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, "run: {stepz: 1, seed: x}\ntrain: {lr: 1}"))
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("control.wait_s=-5", "control.wait_s = -5.0: must be above 0"),
        ("control.heartbeat_s=0", "control.heartbeat_s = 0.0: must be at least 0.01"),
        ("actor.rollout_tries=0", "actor.rollout_tries = 0: must be at least 1 and below 10000"),
        ("actor.temperature=0", "actor.temperature = 0.0: must be above 0 and below 1000000"),
        ("actor.top_p=1.5", "actor.top_p = 1.5: must be above 0 and at most 1"),
        ("train.learning_rate=-1", "train.learning_rate = -1.0: must be at least 0"),
        ("train.learning_rate=.nan", "train.learning_rate = nan: must be a finite number"),
        ("train.beta2=1", "train.beta2 = 1.0: must be at least 0 and below 1"),
        ("run.stop_at_reward=.inf", "run.stop_at_reward = inf: must be a finite number"),
        ("run.evaluate_problems=0", "run.evaluate_problems = 0: must be at least 1"),
        ("sample.gpu_memory_utilization=7", "sample.gpu_memory_utilization = 7.0: must be above 0 and at most 1"),
        ("sample.kv_cache_mib=0", "sample.kv_cache_mib = 0: must be at least 1"),
        ("streams.roll_groups=0", "streams.roll_groups = 0: must be at least 1 and below 1000000"),
        ("verifier.check_s=0", "verifier.check_s = 0.0: must be above 0"),
        ("weights.update_s=0", "weights.update_s = 0.0: must be above 0"),
        ("model.layers=0", "model.layers = 0: must be at least 1 and below 100000"),
        ("control.heartbeat_s=1e-300", "control.heartbeat_s = 1e-300: must be at least 0.01"),
        ("domains.0.weight=0", "domains[0].weight = 0.0: must be above 0 and at most 1e+06"),
        ("domains.0.weight=1e300", "domains[0].weight = 1e+300: must be above 0 and at most 1e+06"),
        ("cluster.nodes=0", "cluster.nodes = 0: must be at least 1 and below 100000"),
    ],
)
def test_values_stay_within_their_bounds(tmp_path, override, words):
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, GOOD), [override])
    assert str(caught.value) == f"--set {override!r}: {words}"


def test_a_problem_is_told_with_the_override_that_made_it_or_else_with_the_file(tmp_path):
    """An override of a key, of what holds it, and of something in it; the last one counts."""
    path = written(tmp_path, GOOD + "verifier: {check_s: x}\n")
    overrides = ["model.path=", "run.steps=1", "control=3", "run.steps=many", "domains.0.weight=0", "actor.max_tokens.x=3"]
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert set(caught.value.args) == {
        f"{path}: verifier.check_s: expected a number, found text 'x'",
        "--set 'model.path=' (nothing behind = is null, model.path=\"''\" is empty text): model.path: expected text, found "
        "null",
        "--set 'run.steps=many': run.steps: expected a whole number, found text 'many'",
        "--set 'control=3': control: expected keys and values, found a whole number",
        "--set 'actor.max_tokens.x=3': actor.max_tokens: expected a whole number, found keys and values {'x': 3}",
    }
    with pytest.raises(ConfigError, match=r"^--set 'domains.0.weight=0': domains\[0\].weight = 0.0: must be above 0"):
        load(written(tmp_path, GOOD), ["domains.0.weight=0"])
    assert load(written(tmp_path, GOOD), ["model.path=''"]).model.path == ""


def test_every_number_has_a_bound_or_may_be_anything():
    """A new option with a number in it needs a thought about its bounds."""
    free = {"run.stop_at_reward"}
    assert set(unbounded(Config, "")) == free


def unbounded(cls, where):
    for name, hint in get_type_hints(cls, include_extras=True).items():
        kind = get_args(hint)[0]
        inner = [c for c in (kind, *get_args(kind)) if dataclasses.is_dataclass(c)]
        if inner:
            yield from unbounded(inner[0], f"{where}{name}.")
        elif {int, float} & {kind, *get_args(kind)} and not bounds_of(hint):
            yield f"{where}{name}"


def test_the_defaults_are_within_their_bounds():
    assert out_of_bounds(Config()) == []


def test_a_missing_file_and_a_bad_override(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="write key=value"):
        load(written(tmp_path, GOOD), ["run.steps"])


def test_loading_imports_no_engine():
    code = "import sys, prl.config.load; print([m for m in ('torch', 'vllm', 'megatron', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
