from prl.actor.troubles import Troubles


def test_of_each_reason_one_is_told_a_second(caplog):
    now_s = 0.0
    troubles = Troubles(lambda: now_s)
    for k in range(1000):
        now_s = k / 400
        troubles.add("often", f"often {k}")
    troubles.add("once", "another")
    assert [record.message for record in caplog.records] == [
        "often 0",
        "often 400 (399 more of often since the last line)",
        "often 800 (399 more of often since the last line)",
        "another",
    ]
    assert troubles.counts == {"often": 1000, "once": 1}
