import pytest

from prl.domains.answers import after_hashes, final_answer, last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and then \boxed{2", "1"),  # the last one was cut
        (r"\boxed{}", ""),
        (r"\boxed{2\\3}", r"2\\3"),
        (r"\boxed{a\}", None),
        ("boxed{3}", None),
        ("", None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


def test_after_hashes():
    assert after_hashes("He has 5.\n#### 5") == "5"
    assert after_hashes("#### 1\nno\n####  2 \nover") == "2"
    assert after_hashes("###") is None


def test_final_answer_prefers_the_box():
    assert final_answer("#### 3\n\\boxed{4}") == "4"
    assert final_answer("#### 3") == "3"
    assert final_answer("\\boxed{}") is None
    assert final_answer("####") is None
    assert final_answer("the answer is 5") is None
