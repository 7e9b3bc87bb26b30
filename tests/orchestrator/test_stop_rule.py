"""Evaluations in a row, over all domains."""

from prl.orchestrator.stop_rule import Score, StopRule


def after(rule, *rewards, first_step=0):
    for k, reward in enumerate(rewards):
        rule = rule.scored(Score(first_step + 10 * k, 512, reward)).closed()
    return rule


def test_it_needs_the_reward_in_a_row():
    rule = StopRule(0.9, 2)
    assert not after(rule, 0.95, 0.89, 0.91).fulfilled
    assert after(rule, 0.95, 0.89, 0.9, 0.9).fulfilled


def test_without_a_reward_it_never_ends():
    assert not after(StopRule(None, 1), 1.0, 1.0).fulfilled


def test_a_steps_reward_is_the_mean_over_the_problems_of_all_domains():
    rule = StopRule(0.9, 1).scored(Score(10, 300, 1.0)).scored(Score(10, 100, 0.5))
    assert not rule.closed().fulfilled  # (300 * 1.0 + 100 * 0.5) / 400 = 0.875
    assert StopRule(0.875, 1).scored(Score(10, 300, 1.0)).scored(Score(10, 100, 0.5)).closed().fulfilled


def test_a_step_is_counted_once_all_that_come_before_it_are_known():
    rule = StopRule(0.9, 1).scored(Score(10, 1, 0.95)).scored(Score(20, 1, 0.1))
    assert rule.closed(evaluating={20}).reached == 1  # another domain of step 20 is still to come
    assert len(rule.closed(evaluating={20}).open) == 1
    assert rule.closed(evaluating={10}).reached == 0


def test_several_open_steps_count_in_their_order():
    rule = StopRule(0.9, 2).scored(Score(20, 1, 0.95)).scored(Score(10, 1, 0.95)).scored(Score(30, 1, 0.1))
    assert rule.closed().reached == 0
    assert StopRule(0.9, 2).scored(Score(20, 1, 0.95)).scored(Score(10, 1, 0.1)).closed().reached == 1
