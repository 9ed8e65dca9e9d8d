"""The drawings, and the two formats that other programs open. More drawings: the docstrings."""

import json
from itertools import pairwise
from textwrap import dedent
from xml.etree import ElementTree

from core.pipeline_parallel.draw import chrome_trace, draw, draw_svg
from core.pipeline_parallel.passes import with_comms
from core.pipeline_parallel.schedules import build_plan, gpipe, interleaved, one_f_one_b, zb_h1
from core.pipeline_parallel.simulate import Costs, simulate


def drawing(text):
    return dedent(text).strip("\n")


def test_gpipe():
    assert draw(gpipe(3, 4)) == drawing("""
        0 0123......aabbccdd
        1 .0123...aabbccdd..
        2 ..0123aabbccdd....
    """)


def test_1f1b_on_two_ranks():
    assert draw(one_f_one_b(2, 5)) == drawing("""
        0 01..aa2bb3cc4dd.ee
        1 .0aa1bb2cc3dd4ee..
    """)


def test_1f1b_with_fewer_microbatches_than_ranks():
    assert draw(one_f_one_b(4, 2)) == drawing("""
        0 01........aa.bb
        1 .01.....aa.bb..
        2 ..01..aa.bb....
        3 ...0aa1bb......
    """)


def test_interleaved_tells_the_chunk_below_each_action():
    assert draw(interleaved(3, 3, 2)) == drawing("""
        0 012012....aa.bb.ccaabbcc
          000111    11 11 11000000
        1 .012012.aa.bb.ccaabbcc..
           000111 11 11 11000000
        2 ..0120aa1bb2ccaabbcc....
            000111111111000000
    """)


def test_interleaved_with_a_microbatch_left_over():
    assert draw(interleaved(2, 5, 2)) == drawing("""
        0 012012.aa3bb4cc3aa4bb.cc.ddeeddee
          000111 11011011100100 00 11110000
        1 .0120aa1bb2cc3aa4bb3cc4ddeeddee..
           000111111111000000100111110000
    """)


def test_zero_bubble_fills_the_holes_of_1f1b():
    assert draw(zb_h1(3, 4)) == drawing("""
        0 012..aA3bBcCdD
        1 .01.a2bA3cBdCD
        2 ..0a1b2cA3dBCD
    """)


def test_the_complete_plan_looks_like_its_compute_order():
    for schedule, order in (("1f1b", one_f_one_b(4, 6)), ("zb_h1", zb_h1(4, 6))):
        assert draw(build_plan(schedule, 4, 6)) == draw(order)


def test_microbatches_are_told_modulo_ten():
    assert draw(gpipe(1, 12)) == "0 012345678901aabbccddeeffgghhiijjaabb"


def test_ranks_are_aligned_and_a_width_scales():
    lines = draw(one_f_one_b(11, 3)).splitlines()
    assert [line[:3] for line in lines[::5]] == [" 0 ", " 5 ", "10 "]
    assert draw(simulate(gpipe(2, 2)), width=18) == drawing("""
        0 0011......aaaabbbb
        1 ..0011aaaabbbb....
    """)


def test_the_svg_is_xml_with_one_box_per_action():
    plan = build_plan("interleaved", 2, 4, 2)
    timelines = {"plan <1>": simulate(plan), "b": simulate(gpipe(2, 3))}
    root = ElementTree.fromstring(draw_svg(timelines))
    space = "{http://www.w3.org/2000/svg}"
    boxes = root.findall(f"{space}g")
    assert len(boxes) == 2 * 4 * 2 * 2 + 2 * 3 * 2
    titles = [box.find(f"{space}title").text for box in boxes]
    assert titles[0] == "F0@0 forward, 0 to 1"
    widths = {float(box.find(f"{space}rect").get("width")) for box in boxes}
    assert len(widths) == 2  # forwards, and backwards twice as wide
    ends = [
        float(rect.get("x")) + float(rect.get("width"))
        for rect in root.iter(f"{space}rect")
        if rect.get("x")
    ]
    assert max(ends) <= 1200
    assert "plan <1>: span 27" in root.find(f"{space}text").text


def test_the_trace_has_a_thread_per_rank_and_no_overlap():
    timeline = simulate(with_comms(zb_h1(3, 4)), Costs(link=0.25))
    trace = json.loads(chrome_trace({"plan": timeline}, microseconds=1000))
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"]
    assert names == ["plan", "rank 0", "rank 1", "rank 2"]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 3 * 4 * 3
    assert {e["cat"] for e in spans} == {"forward", "input gradient", "weight gradient"}
    for rank in range(3):
        mine = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == rank)
        assert all(one[1] <= following[0] for one, following in pairwise(mine))
    assert max(e["ts"] + e["dur"] for e in spans) == timeline.span * 1000
