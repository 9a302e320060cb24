#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Opens the page of `trace export --format html` of a scene in Chromium and compares it with the report of the same recording:
page.py CHROMIUM FOLDER PAGE REPORT-JSON story|names|nodes_only|large."""
import json, os, sys

from browser import Browser

SPANS, HEDGED_SPANS, PAGE_SPANS, PAGE_BYTES = 19, 27, 100000, 8 << 20
CALL_LANES = {("client caller (100)", "calls"), ("client caller (100)", "to node0"), ("client caller (100)", "to node1"),
              ("node0 (200)", "serve"), ("node0 (200)", "expert 1"), ("node0 (200)", "worker 200"),
              ("node1 (300)", "serve"), ("node1 (300)", "expert 2"), ("node1 (300)", "worker 300")}


def data(browser, selector):
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => ({{...e.dataset}}))")


def view(browser):
    return browser.run("({...document.getElementById('view').dataset, ...document.getElementById('timeline').dataset, "
                       "title: document.getElementById('view-title').textContent, hash: location.hash})")


def check_lanes(browser, expected=None):
    """Each lane has spans, and each of its rows shows some: not all of it is background. The lanes, as (process, lane)."""
    lanes = browser.run("""(() => { const c = document.getElementById('timeline'), x = c.getContext('2d'), left = 150, row = 18;
        return [...document.querySelectorAll('#rows .lane')].map(e => [e.dataset.process, e.dataset.lane, +e.dataset.spans,
          [...Array(+e.dataset.depth).keys()].map(k => { let ink = 0;
            const d = x.getImageData(left, +e.dataset.y + k * row + 2, c.width - left, row - 4).data;
            for (let i = 0; i < d.length; i += 4) {
              const rgb = [d[i], d[i + 1], d[i + 2]];
              if (d[i + 3] > 40 && Math.max(...rgb) - Math.min(...rgb) > 12) ink++;
            } return ink; })]); })()""")
    assert lanes, "no lane"
    for process, lane, spans, ink in lanes:
        assert spans > 0 and ink and all(ink), (process, lane, spans, ink)
    got = {(process, lane) for process, lane, _, _ in lanes}
    assert expected is None or got == expected, got ^ expected
    return got


def dur(ns):
    """As the page writes it: three digits."""
    value, unit = ns, 0
    while value >= 999.5 and unit < 3:
        value, unit = value / 1000, unit + 1
    return f"{value:.{0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2}f} {['ns', 'µs', 'ms', 's'][unit]}"


def check_figures(browser, report):
    """The summary has the report's numbers, and the words made of them."""
    said = browser.run("({...document.getElementById('report').dataset})")
    for key, name in (("calls", "count"), ("p50", "p50_ns"), ("p99", "p99_ns"), ("failed", "failed"), ("unused", "unused")):
        assert int(said[key]) == report["calls"][name], (key, said, report["calls"])
    assert browser.run("document.getElementById('sentence').textContent") == report["summary"]
    stages = {s["name"]: s["total_ns"] for s in report["critical_path"] if s["total_ns"] > 0}
    assert {s["stage"]: int(s["ns"]) for s in data(browser, "#stage-list a")} == stages
    assert sum(stages.values()) == report["calls"]["total_ns"]
    for s in report["critical_path"]:
        if s["share"] >= 0.1:
            text = browser.run(f"document.querySelector('#stage-list a[data-stage={s['name']}]').textContent")
            assert f"{100 * s['share']:.0f} %" in text and dur(s["total_ns"] / report["calls"]["count"]) in text, (s, text)
            width = browser.run(f"parseFloat(document.querySelector('#call-stages [data-selects=\"stage={s['name']}\"]').style.width)")
            assert abs(width - 100 * s["share"]) < 0.01, (s, width)
    nodes = {n["node"]: n for n in data(browser, "#nodes tbody tr")}
    assert set(nodes) == {p["name"] for p in report["peers"]}
    for p in report["peers"]:
        n = nodes[p["name"]]
        assert [int(n[k]) for k in ("frames", "p50", "p99", "failed", "unused")] == \
            [p["exchange"]["count"], p["exchange"]["p50_ns"], p["exchange"]["p99_ns"], p["failed"], p["unused"]], (n, p)
        assert abs(float(n["waited"]) - p["waited_share"]) < 1e-9
        row = browser.run(f"[...document.querySelectorAll('#nodes tr[data-node={json.dumps(p['name'])}] td')].map(e => e.textContent)"
                          if p["name"].isalnum() else "null")
        if row is not None:
            assert row[1].replace(",", "") == str(p["exchange"]["count"]) and row[2].split("▲")[0].strip() == dur(p["exchange"]["p50_ns"]), row
            assert row[3].split("▲")[0].strip() == dur(p["exchange"]["p99_ns"]) and row[5].lstrip("✕ ") == str(p["failed"]), row
            assert row[6] == str(p["unused"]) and ("▲" in "".join(row)) == (report["slowest_node"] is not None and
                                                                             report["slowest_node"]["name"] == p["name"]), row
    failures = [(f["status"], f["of"], int(f["count"])) for f in data(browser, "#failed tbody tr")]
    assert failures == [(f["status"], f["of"], f["count"]) for f in report["failures"]], failures
    listed = data(browser, "#calls tbody tr")
    for row, call in zip(listed, report["slowest"]):
        assert (row["call"], int(row["ns"])) == (call["call"], call["duration_ns"]), (row, call)


def check_sizes(browser):
    """In both sizes and themes: nothing wider than the page, no text below 12 px, the whole summary on the first screen."""
    for width, height in ((1280, 800), (800, 600)):
        browser.size(width, height)
        for dark in (False, True):
            browser.dark(dark)
            browser.wait("document.querySelector('#chart svg').viewBox.baseVal.width === document.getElementById('chart').clientWidth")
            assert browser.run("document.documentElement.scrollWidth") <= width
            small = browser.run("[...document.querySelectorAll('main *')].filter(e => e.textContent.trim() && "
                                "parseFloat(getComputedStyle(e).fontSize) < 12).map(e => e.outerHTML.slice(0, 99))")
            assert not small, small
            assert browser.run("(window.scrollTo(0, 0), document.getElementById('nodes').getBoundingClientRect().bottom)") < height
    browser.size(1280, 800)
    browser.dark(False)


def follow_clicks(browser, report):
    assert "slowest call" in view(browser)["title"]
    failed = report["failures"][0]["first_calls"][0]
    browser.click(f"#failures a[data-call='{failed}']")
    browser.wait(f"document.getElementById('view').dataset.call === '{failed}'")
    assert "DEADLINE_EXCEEDED" in view(browser)["title"] and int(view(browser)["spans"]) == SPANS - 1, view(browser)
    check_lanes(browser, CALL_LANES)

    browser.click("#nodes a[data-selects='node=node1']")
    browser.wait("document.getElementById('view').dataset.context === 'node'")
    assert view(browser)["title"] == "Node node1" and view(browser)["call"] == ""
    for process, lane in check_lanes(browser):
        assert process == "node1 (300)" or lane == "to node1", (process, lane)

    browser.click("#stage-list a[data-stage=compute]")
    browser.wait("document.getElementById('view').dataset.context === 'stage'")
    assert view(browser)["call"] in report["failures"][0]["first_calls"], view(browser)  # their job took longest
    check_lanes(browser, CALL_LANES)

    browser.click("#heat .cell[data-expert='2']")
    browser.wait("document.getElementById('view').dataset.context === 'expert'")
    check_lanes(browser, {("node1 (300)", "expert 2"), ("node1 (300)", "worker 300")})

    browser.click("#chart svg a:last-of-type")
    browser.wait("document.getElementById('view').dataset.context === 'window'")
    assert len(data(browser, "#calls tbody tr")) == report["calls"]["count"] // 100
    check_lanes(browser)

    browser.click("#lists a[data-selects='list=hedged']")
    browser.wait("document.getElementById('view').dataset.value === 'hedged'")
    assert len(data(browser, "#calls tbody tr")) == report["calls"]["unused"]
    browser.click("#calls tbody tr:nth-child(2) a")
    browser.wait("document.querySelector('#calls tbody tr:nth-child(2)').getAttribute('aria-current') === 'true'")
    assert int(view(browser)["spans"]) == HEDGED_SPANS, view(browser)
    check_lanes(browser, CALL_LANES)
    browser.click("#back")
    browser.wait("document.getElementById('view').dataset.value === 'slowest'")


def use_keys(browser, page):
    """From a list to a call, in its timeline, and back; the address brings the same to somebody else."""
    browser.run("document.querySelector('#calls a').focus()")
    browser.press("Enter")
    browser.wait("location.hash.includes('call=') && !document.getElementById('back').hidden")  # the page follows its address later
    assert browser.run("document.activeElement.closest('#calls') !== null"), "the focus was lost"
    browser.run("document.getElementById('timeline-box').focus()")
    browser.press("n")
    detail = browser.run("document.getElementById('span-detail').textContent")
    assert detail.startswith("forward 200 µs"), detail
    whole = int(view(browser)["visible"])
    for _ in range(8):
        browser.press("+")
    browser.wait("location.hash.includes('at=')")
    some = view(browser)
    assert 0 < int(some["visible"]) < whole and int(some["lanes"]) < len(CALL_LANES), (whole, some)
    check_lanes(browser)
    browser.press("Escape")
    browser.wait("document.getElementById('view').dataset.value === 'slowest' && document.getElementById('back').hidden")
    browser.run("history.back()")
    browser.wait("location.hash.includes('call=')")
    browser.open(f"file://{page}{some['hash']}")
    assert {k: view(browser)[k] for k in ("call", "lanes", "visible")} == {k: some[k] for k in ("call", "lanes", "visible")}
    browser.open(f"file://{page}#call=0123")
    assert browser.run("document.getElementById('find-note').textContent") == "this page has no call 0123"


def story(browser, page, report):
    browser.open(f"file://{page}")
    check_figures(browser, report)
    check_sizes(browser)
    follow_clicks(browser, report)
    use_keys(browser, page)


def names(browser, page, report):
    """A node's name is text wherever it stands, and in the address."""
    hostile = next(p["name"] for p in report["peers"] if p["name"] != "node0")
    browser.open(f"file://{page}")
    check_figures(browser, report)
    browser.click(f"#nodes tr[data-node={json.dumps(hostile)}] a")
    browser.wait("document.getElementById('view').dataset.context === 'node'")
    assert view(browser)["title"] == "Node " + hostile
    assert any(lane == "to " + hostile for _, lane in check_lanes(browser))
    browser.open(f"file://{page}#node=%3Cimg%20src=x%20onerror=document.title=1%3E")
    assert "<img" in browser.run("document.getElementById('find-note').textContent")
    assert browser.run("document.title") == "expertd trace"
    assert browser.run("document.querySelectorAll('img, body svg:not(#chart svg)').length") == 0
    assert browser.run("document.scripts.length") == 2


def nodes_only(browser, page, report):
    browser.open(f"file://{page}")
    assert browser.run("document.getElementById('sentence').textContent") == report["summary"]
    assert "No caller" in report["summary"]
    check_lanes(browser, {(p, lane) for p, lane in CALL_LANES - {("node0 (200)", "expert 1"), ("node1 (300)", "expert 2")}
                          if not p.startswith("client")} | {("node0 (200)", "experts"), ("node1 (300)", "experts")})
    browser.click("#nodes a[data-selects='node=node0']")
    browser.wait("document.getElementById('view').dataset.context === 'node'")
    assert {p for p, _ in check_lanes(browser)} == {"node0 (200)"}


def large(browser, page, report):
    assert report["spans"] > PAGE_SPANS and os.path.getsize(page) < PAGE_BYTES, (report["spans"], os.path.getsize(page))
    browser.open(f"file://{page}")
    check_figures(browser, report)
    kept, calls = browser.run("[D.spans.length, D.calls.length]")
    assert kept <= PAGE_SPANS
    assert f"{kept:,} of {report['spans']:,} spans" in browser.run("document.getElementById('kept').textContent")
    assert browser.run("D.calls.filter(c => c[C.STATUS]).length") == report["calls"]["failed"]
    assert browser.run("everyCall.filter(i => spansOf(i).length !== D.calls[i][C.SPANS]).length") == 0, "a call is not whole"
    print(kept, "spans,", calls, "calls,", os.path.getsize(page), "bytes")


def main():
    program, folder, page, report, what = sys.argv[1:]
    browser = Browser(program, folder)
    try:
        {"story": story, "names": names, "nodes_only": nodes_only, "large": large}[what](browser, page, json.load(open(report)))
        assert not browser.errors, browser.errors
    finally:
        browser.close()


main()
