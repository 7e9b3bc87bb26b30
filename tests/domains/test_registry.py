import dataclasses
import sys

import pytest

from prl.config.load import replace
from prl.config.schema import Config
from prl.domains.api import DomainError
from prl.domains.options import DomainOptions
from prl.domains.registry import check_domain, domain_problems, find_domain, load_split

WHOLE = """
from prl.domains.api import Problem
def load_problems(options, split, seed):
    return [Problem({"n": n}) for n in range(options.get("n", 3))] if split == "train" else []
async def generate_rollout(problem, sampler, context):
    return None
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "mytasks"
    package.mkdir()
    (package / "__init__.py").write_text("")

    def write(name, text):
        (package / f"{name}.py").write_text(text)
        return f"mytasks.{name}"

    yield write
    for name in [name for name in sys.modules if name.startswith("mytasks")]:
        del sys.modules[name]


def test_own_domains():
    for name in ("digits", "gsm8k"):
        domain = find_domain(name)
        assert domain.name == name
        assert domain.check_options is not None
    assert find_domain("digits").score_group is None
    assert find_domain("gsm8k").score_group is not None


def test_a_module_of_the_users_own(module):
    domain = find_domain(module("whole", WHOLE))
    assert len(load_split(domain, {}, "train", 1)) == 3
    assert load_split(domain, {}, "evaluate", 1) == []
    check_domain("mytasks.whole", {})
    with pytest.raises(DomainError, match=r"no problems to train on, with the options {'n': 0}; name data that has some"):
        load_split(domain, {"n": 0}, "train", 1)


@pytest.mark.parametrize("name", ["nonsense", "mytasks.absent", "", "a..b", ".digits", "absent.deep.inside"])
def test_unknown_names(module, name):
    with pytest.raises(DomainError, match=r"no domain .*digits, gsm8k\)"):
        find_domain(name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "no function load_problems"),
        ("def load_problems(options, split, seed): return []", "no function generate_rollout"),
        (WHOLE.replace("async def", "def"), "generate_rollout must be an `async def`"),
        (WHOLE + "\ndef score_group(p, r, c): pass", "score_group must be an `async def`"),
        (WHOLE.replace("split, seed", "split"), r"broken.py\): load_problems must take \(options, split, seed\)"),
        (WHOLE.replace("sampler, context", "*, sampler, context"), r"generate_rollout must take \(problem, sampler, context\)"),
        (WHOLE + "\nasync def score_group(p, r): pass", r"score_group must take \(problem, rollouts, context\)"),
        (WHOLE + "\ndef check_options(): pass", r"check_options must take \(options\)"),
        (
            "import module_that_is_not_there",
            r"importing mytasks.broken failed \(.*/broken.py, line 1\): ModuleNotFoundError.*module_that_is_not_there",
        ),
        ("x = 1\n1 / 0", r"importing mytasks.broken failed \(.*/broken.py, line 2\): ZeroDivisionError"),
        ("x = (", r"importing mytasks.broken failed: SyntaxError: .*\(broken.py, line 1\)"),
        ("import sys; sys.exit(0)", r"importing mytasks.broken failed \(.*\): SystemExit: 0"),
    ],
)
def test_incomplete_modules(module, text, words):
    with pytest.raises(DomainError, match=words):
        find_domain(module("broken", text))


def test_a_package_that_cannot_be_imported_is_not_taken_for_absent(module):
    module("__init__", "import module_that_is_not_there")
    with pytest.raises(
        DomainError, match=r"importing mytasks.whole failed \(.*/__init__.py, line 1\): .*module_that_is_not_there"
    ):
        find_domain(module("whole", WHOLE))


def test_a_failure_to_load_names_the_domain(module):
    name = module("faulty", WHOLE.replace("    return [", "    {}[split]; return [", 1))
    with pytest.raises(DomainError, match=rf"domain {name}: load_problems failed \(split train\): KeyError: 'train'"):
        load_split(find_domain(name), {}, "train", 1)


def test_problems_must_be_problems(module):
    name = module("odd", "def load_problems(o, split, s): return ['x']\nasync def generate_rollout(p, s, c): pass")
    with pytest.raises(DomainError, match="sequence of Problem"):
        load_split(find_domain(name), {}, "train", 1)


@pytest.mark.parametrize("function", ["check_options", "has_held_out"])
@pytest.mark.parametrize(("raised", "words"), [("KeyError(1)", "KeyError: 1"), ("SystemExit(0)", "SystemExit: 0")])
def test_whatever_a_domains_checks_raise_is_told(module, function, raised, words):
    name = module("raising", WHOLE + f"\ndef {function}(options): raise {raised}")
    config = dataclasses.replace(Config(), domains=(DomainOptions(name=name),))
    assert domain_problems(config) == [f"domains[0]: domain {name}: {function} failed: {words}"]


def test_a_domain_that_ends_the_program_while_it_loads_is_told(module):
    name = module("ending", WHOLE.replace("    return [", "    raise SystemExit(0); return [", 1))
    with pytest.raises(DomainError, match=rf"domain {name}: load_problems failed \(split train\): SystemExit: 0"):
        load_split(find_domain(name), {}, "train", 1)


def test_a_task_under_two_names_is_one_task():
    config = replace(Config(), model={"init": "random", "architecture": "qwen2"})
    names = ("digits", "prl.domains.digits")
    (line,) = domain_problems(dataclasses.replace(config, domains=tuple(DomainOptions(name=name) for name in names)))
    assert line.startswith("domains[1].name = prl.domains.digits: is the task of domains[0], digits; name a task once")
