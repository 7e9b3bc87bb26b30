import signal
import sys

import pytest

from prl.cluster.run import Output, ProgramError, beyond_signals, run


def python(code, **options):
    return run([sys.executable, "-c", code], **options)


def test_output_and_code():
    assert python("print('a b'); import sys; sys.exit(3)", check=False) == Output(3, "a b\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-program-anywhere"], "no-such-program-anywhere: no such program"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "no answer within 0.2 s"),
        ([sys.executable, "-c", "import sys; sys.exit('broken')"], "exit code 1.*broken"),
    ],
)
def test_failures_say_which_program_and_how(arguments, words):
    with pytest.raises(ProgramError, match=words):
        run(arguments, timeout_s=0.2 if "sleep" in arguments[-1] else 10.0)


def test_no_shell_looks_at_the_arguments():
    assert run([sys.executable, "-c", "import sys; print(sys.argv[1])", "$HOME; ls *"]).out == "$HOME; ls *\n"


def test_what_is_to_be_read_arrives_and_otherwise_nothing():
    assert python("import sys; print(sys.stdin.read())", stdin="a b").out == "a b\n"
    assert python("import sys; print(sys.stdin.read())").out == "\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_a_program_that_must_not_end_with_its_job_outlives_what_ends_it(name):
    line = f"import os, signal; os.kill(os.getpid(), signal.{name}); print('lives')"
    assert python(line, check=False).code == -signal.Signals[name]
    with beyond_signals():
        assert python(line).out == "lives\n"
    assert python(line, check=False).code == -signal.Signals[name]
