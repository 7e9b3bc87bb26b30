"""The silence that counts for a process that was held up itself."""

from prl.flow.patience import Patience


def test_after_a_long_hold_up_there_is_as_much_time_to_be_heard_as_ever():
    patience = Patience(30.0)
    assert patience.limit_s(100.0) == 30.0
    patience.held_up(200.0, 300.0)
    assert patience.limit_s(329.9) == 230.0  # who was heard until 100 at the latest is not lost before 330
    assert patience.limit_s(330.0) == 30.0


def test_one_that_is_lost_is_noticed_however_often_there_are_hold_ups():
    """Of each 3 seconds 2 are one; nobody is heard after second 50."""
    patience, now, noticed = Patience(30.0), 0.0, None
    while noticed is None and now < 1000:
        now += 3.0
        patience.held_up(2.0, now)
        if now - 50.0 > patience.limit_s(now):
            noticed = now
    assert noticed is not None
    assert 80.0 < noticed <= 50 + 30 + 20 + 3
