"""Layers on stages: the sum is always the number asked for, or the placement is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.pipeline_parallel.layout import LayoutError, parse_layout
from core.pipeline_parallel.placement import Placement, PlacementError, place_layers


def layers(num_layers, pp, **flags):
    return place_layers(num_layers, pp, **flags).layers


# ---- balanced -----------------------------------------------------------------------------------


def test_no_layer_is_lost_when_stages_do_not_divide_them():
    """C033: 30 layers on 4 stages became 28, each stage taking the floor, without a word."""
    assert layers(6, 4) == (1, 2, 2, 1)
    assert layers(30, 4) == (7, 8, 8, 7)


def test_any_number_of_layers_over_any_number_of_ranks():
    """C105: uneven, explicit, and with embedding and loss counted as work."""
    assert layers(7, 4) == (2, 2, 2, 1)
    assert layers(5, 4) == (1, 1, 2, 1)
    assert layers(8, 4) == (2, 2, 2, 2)
    assert layers(6, 4, layout="1,2,1,2") == (1, 2, 1, 2)
    assert layers(6, 4, count_embedding=True, count_loss=True) == (1, 2, 2, 1)
    assert layers(30, 4, count_embedding=True, count_loss=True) == (7, 8, 8, 7)
    assert layers(31, 4, count_loss=True) == (8, 8, 8, 7)
    assert layers(2, 4, count_embedding=True, count_loss=True) == (0, 1, 1, 0)


@settings(deadline=None)
@given(st.data())
def test_a_balanced_split_is_whole_and_even(data):
    pp = data.draw(st.integers(1, 8))
    chunks = data.draw(st.integers(1, 4)) if pp > 1 else 1
    embedding, loss = data.draw(st.booleans()), data.draw(st.booleans())
    least = max(1, pp * chunks - embedding - loss)
    count = data.draw(st.integers(least, 100))
    placed = place_layers(count, pp, chunks=chunks, count_embedding=embedding, count_loss=loss)
    assert placed.num_layers == count and placed.chunks == chunks
    work = list(placed.layers)
    work[0] += embedding
    work[-1] += loss
    assert max(work) - min(work) <= 1 and min(work) >= 1
    per_rank = [sum(work[s] for s in placed.stages_of(rank)) for rank in range(pp)]
    assert max(per_rank) - min(per_rank) <= 1
    numbers = [n for stage in range(placed.stages) for n in placed.layers_of(stage)]
    assert numbers == list(range(count))


@settings(deadline=None)
@given(st.data())
def test_where_megatron_can_place_layers_we_place_them_alike(data):
    """Its rule: (layers + what is counted) / pp / chunks each, less one where something counts."""
    pp = data.draw(st.integers(2, 8))
    chunks, each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    embedding, loss = data.draw(st.booleans()), data.draw(st.booleans())
    count = pp * chunks * each - embedding - loss
    expected = [each] * (pp * chunks)
    expected[0] -= embedding
    expected[-1] -= loss
    if count >= 1:
        flags = {"count_embedding": embedding, "count_loss": loss}
        assert layers(count, pp, chunks=chunks, **flags) == tuple(expected)


# ---- first, last, chunks ------------------------------------------------------------------------


def test_first_and_last_ranks_by_hand():
    assert layers(14, 4, first=3, last=3) == (3, 4, 4, 3)
    assert layers(13, 4, first=3, last=3) == (3, 3, 4, 3)
    assert layers(10, 4, first=1) == (1, 3, 3, 3)
    assert layers(10, 4, last=0) == (3, 3, 4, 0)
    assert layers(9, 2, first=4) == (4, 5)
    assert layers(9, 2, first=4, last=5) == (4, 5)
    # The counts are the rank's, over its chunks; the loss stage is the one with fewer.
    assert layers(16, 4, chunks=2, first=3, last=3) == (1, 2, 2, 2, 2, 3, 3, 1)


def test_chunks_by_number_or_by_size():
    assert layers(16, 2, chunks=4) == layers(16, 2, layers_per_chunk=2) == (2,) * 8
    assert place_layers(16, 2, layers_per_chunk=8).chunks == 1
    assert layers(10, 2, chunks=3) == (1, 2, 2, 2, 2, 1)


@settings(deadline=None)
@given(st.data())
def test_first_and_last_are_kept_and_the_rest_is_even(data):
    pp = data.draw(st.integers(2, 6))
    chunks = data.draw(st.integers(1, 3))
    first = data.draw(st.none() | st.integers(chunks - 1, 12))
    last = data.draw(st.none() | st.integers(chunks - 1, 12))
    count = data.draw(st.integers(1, 60))
    try:
        placed = place_layers(count, pp, chunks=chunks, first=first, last=last)
    except PlacementError:
        given_ranks = (first is not None) + (last is not None)
        rest = count - (first or 0) - (last or 0)
        others = pp - given_ranks
        assert rest < others * chunks or (rest and not others)
        return
    assert placed.num_layers == count
    per_rank = [sum(placed.layers[s] for s in placed.stages_of(rank)) for rank in range(pp)]
    assert first in (None, per_rank[0]) and last in (None, per_rank[-1])
    between = per_rank[first is not None : pp - (last is not None)]
    assert not between or max(between) - min(between) <= 1


# ---- explicit -----------------------------------------------------------------------------------


def test_megatrons_layout_of_its_manual():
    found = layers(61, 16, layout="Et*3|(tt|)*29,|L")
    assert found == (3,) + (2,) * 29 + (0, 0)
    assert place_layers(4, 2, layout="E|tt|tt|L").chunks == 2


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Ett|ttL", ["Ett", "ttL"]),
        ("E t*2 | t*2, L", ["Ett", "ttL"]),
        ("E(t|)*3L", ["Et", "t", "t", "L"]),
        ("E(t(t|)*2)*2L", ["Ett", "t", "tt", "t", "L"]),
        ("E||t|L", ["E", "", "t", "L"]),
        ("Et|*2tL", ["Et", "", "tL"]),
        ("3", ["EtttL"]),
        (" 0, 2 ,1", ["E", "tt", "tL"]),
        ("E t*0 | L", ["E", "L"]),
    ],
)
def test_layouts_are_written_out(text, stages):
    assert parse_layout(text) == stages


@pytest.mark.parametrize(
    ("text", "at", "said"),
    [
        ("Et|tmL", 5, "m (multi-token prediction) layers are not built here"),
        ("Et|xL", 4, "'x' is no symbol; use E, t, L, |"),
        ("Et*3|(tt|L", 6, "this ( is not closed"),
        ("Et)*3|L", 3, "this ) has no ("),
        ("*3t", 1, "* repeats the symbol or the (...) before it"),
        ("Et**3", 3, "* repeats the symbol"),
        ("Et*99999999999|L", 2, "more than 100000 symbols from here"),
        ("E((t*50000)*50000)*50000|L", 3, "more than 100000 symbols from here"),
        ("(" * 12 + ")" * 12, 11, "parentheses are nested more than ten deep"),
        ("1,2,", 1, "'1' is no symbol"),
        ("1,-2", 1, "'1' is no symbol"),
        ("1,9999999", 1, "10000000 layers are too many"),
    ],
)
def test_a_layout_that_cannot_be_read_shows_the_place(text, at, said):
    with pytest.raises(LayoutError) as caught:
        parse_layout(text)
    message = str(caught.value)
    assert said in message and f"at character {at}:" in message
    assert message.splitlines()[-1].index("^") == 4 + at - 1


# ---- refusals -----------------------------------------------------------------------------------

PP, CHUNKS = "--pipeline-model-parallel-size", "--num-virtual-stages-per-pipeline-rank"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
LAYOUT = "--pipeline-model-parallel-layout"


@pytest.mark.parametrize(
    ("count", "pp", "flags", "said"),
    [
        (3, 4, {}, f"--num-layers 3 cannot fill {PP} 4 x 1 virtual stages = 4 stages; use {PP} 3"),
        (9, 4, {"chunks": 3}, f"use {PP} 3 or less, or {CHUNKS} 2 or less, or a {LAYOUT} with"),
        (3, 4, {"chunks": 2}, f"= 8 stages; use a {LAYOUT} with empty stages"),
        (1, 4, {"count_loss": True}, "--num-layers 1 (2 with what is counted as a layer) cannot"),
        (0, 2, {}, "--num-layers 0"),
        (4, 0, {}, f"{PP} 0"),
        (4, 2, {"chunks": 0}, f"{CHUNKS} 0"),
        (8, 1, {"chunks": 2}, f"2 virtual stages per rank need {PP} 2 or more, which is 1"),
        (8, 1, {"layers_per_chunk": 4}, f"2 virtual stages per rank need {PP} 2 or more"),
        (8, 1, {"layout": "2,2,4"}, f"3 virtual stages per rank need {PP} 2 or more"),
        (8, 2, {"layers_per_chunk": 3}, f"x {PP} 2 does not divide --num-layers 8; use 1, 2 or 4"),
        (8, 2, {"layers_per_chunk": 0}, "use 1, 2 or 4"),
        (7, 2, {"layers_per_chunk": 3}, f"use {CHUNKS}, which takes any number of layers"),
        (8, 2, {"first": 3, "last": 3}, "leave 2 of --num-layers 8 for 0 other ranks"),
        (8, 2, {"first": 3, "last": 3}, "they have to be 8 together"),
        (8, 4, {"first": 3, "last": 4}, "use 6 or less together, so that each stage gets a layer"),
        (8, 4, {"first": -1}, f"{FIRST} -1 cannot fill 1 virtual stages; use 0 or more"),
        (8, 1, {"last": 8}, f"{LAST} 8 needs {PP} 2 or more, which is 1"),
        (8, 4, {"first": 2, "count_loss": True}, "both place layers; give one of them"),
        (8, 4, {"layout": "2,2,2,2", "last": 2}, f"{LAYOUT} and {LAST} both place layers"),
        (8, 2, {"chunks": 2, "layers_per_chunk": 2}, f"and {CHUNKS} both place layers"),
        (8, 2, {"layout": "4,3"}, "has 7 layers (t) and --num-layers is 8; they must be equal"),
        (8, 2, {"layout": "Et|t*6|tL"}, f"has 3 stages; it needs a multiple of {PP} 2"),
        (8, 2, {"layout": "4,4", "chunks": 2}, f"it needs {PP} 2 x {CHUNKS} 2 = 4"),
        (8, 2, {"layout": "t*4|Et*4L"}, "has 1 E (embedding); it needs one, first in the first"),
        (8, 2, {"layout": "Et*4|t*4"}, "has 0 L (loss); it needs one, last in the last stage"),
        (8, 2, {"layout": ""}, "has 0 E (embedding)"),
    ],
)
def test_a_placement_that_cannot_be(count, pp, flags, said):
    with pytest.raises(PlacementError) as caught:
        place_layers(count, pp, **flags)
    assert said in str(caught.value)


def test_the_log_names_embedding_layers_and_loss():
    placed = Placement((0, 1, 3, 0, 1, 0), pp=3)
    assert str(placed) == (
        "stage 0 (rank 0): embedding\n"
        "stage 1 (rank 1): layer 0\n"
        "stage 2 (rank 2): layers 1-3\n"
        "stage 3 (rank 0): nothing\n"
        "stage 4 (rank 1): layer 4\n"
        "stage 5 (rank 2): loss"
    )
    assert list(placed.stages_of(1)) == [1, 4]
    assert str(place_layers(1, 1)) == "stage 0 (rank 0): embedding, layer 0, loss"
