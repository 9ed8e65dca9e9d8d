"""The ledger: totals, tables, digests, and what is forgotten."""

import pytest

from core.comm.ledger import Ledger, wire_bytes


def note(ledger: Ledger, **changes) -> None:
    event = {"op": "all_reduce", "group": "tp", "size": 4, "dtype": "float32", "numel": 10,
             "payload": 40, "tag": "x"}  # fmt: skip
    ledger.record(**{**event, **changes})


def test_wire_follows_the_ring_model():
    assert wire_bytes("all_reduce", 4, 1000) == 1500
    assert wire_bytes("all_gather", 4, 1000) == wire_bytes("reduce_scatter", 4, 1000) == 750
    assert wire_bytes("send", 2, 1000) == 1000
    assert wire_bytes("recv", 2, 1000) == wire_bytes("barrier", 2, 0) == 0
    with pytest.raises(ValueError, match="'gossip'"):
        wire_bytes("gossip", 2, 1)


def test_totals_by_where():
    ledger = Ledger()
    ledger.begin_step(1)
    note(ledger)
    with ledger.at("F0@0"):
        note(ledger, group="dp")
    assert ledger.total(group="tp") == 60
    assert ledger.total(group="dp", at="F0@0") == 60
    assert ledger.total("payload") == 80
    assert ledger.total(at="optimizer") == 0
    with pytest.raises(ValueError, match="speed"):
        ledger.total(speed=1)


def test_old_steps_are_dropped_but_stay_in_the_totals():
    ledger = Ledger(keep_steps=2)
    for step in range(1, 6):
        ledger.begin_step(step)
        note(ledger)
    assert [e.step for e in ledger.events()] == [4, 5]
    assert ledger.grand_totals()["tp", "all_reduce"].calls == 5


def test_digests_differ_where_ranks_diverge():
    def digest(**changes):
        ledger = Ledger()
        note(ledger)
        note(ledger, **changes)
        return ledger.digest("tp", 0)

    assert digest() == digest()
    for change in ({"dtype": "int32"}, {"tag": "y"}, {"numel": 5}, {"op": "all_gather"}):
        assert digest(**change) != digest()
    assert digest(group="dp", tag="z") == digest(group="dp")


def test_the_table_is_a_picture():
    ledger = Ledger()
    note(ledger)
    note(ledger)
    note(ledger, group="dp", op="all_gather", size=2, payload=80)
    assert ledger.table() == "\n".join(
        [
            "group  op          calls  payload bytes  wire bytes",
            "dp     all_gather      1             80          40",
            "tp     all_reduce      2             80         120",
            "total                  3            160         160",
        ]
    )


def test_the_tail_says_what_was_done_last():
    ledger = Ledger()
    assert ledger.tail() == "(nothing was communicated)"
    note(ledger, tag="layers.3.mlp.down")
    assert ledger.tail(1) == (
        "#0 step 0 startup: all_reduce layers.3.mlp.down on tp[4] float32 x 10"
    )
