"""/leyline in a real browser."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from agent_run import ask, history, run_agent, turns_of
from browser import chromium, executable, missing
from tiny_server import Running, running, tiny_engine

from leyline.server.inspect.page import HEADERS
from leyline.server.inspect.view import MOST_SESSIONS
from leyline.server.limits import Settings

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

PHONE: ViewportSize = {"width": 360, "height": 740}
KINDS = ("shared", "moved", "copied", "repaired", "computed", "evicted")
HOSTILE = "<script>window.hacked=1</script><img src=x onerror=window.hacked=1>"

SEE = """
// What a colour is on the page, as red, green, blue from 0 to 1.
const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map((each) => each / 255);
const light = (text) => {
  const linear = rgb(text).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
};
const contrast = (a, b) => {
  const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
  return (high + 0.05) / (low + 0.05);
};
const style = (element) => getComputedStyle(element);
// The colour behind an element's text.
const ground = (element) => {
  const own = style(element).backgroundColor;
  return own.endsWith(", 0)") && element.parentElement ? ground(element.parentElement) : own;
};
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if why := missing():
        if os.environ.get("CI") and executable():
            pytest.fail(why)
        pytest.skip(why)
    with chromium() as it:
        yield it


@pytest.fixture
def expected() -> list[str]:
    """Words of console errors that a test means to cause."""
    return []


@pytest.fixture
def page(browser: Browser, expected: list[str]) -> Iterator[Page]:
    """A page on which any other console error, violation of the policy or failed script is a
    failure."""
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    page = context.new_page()
    page.set_default_timeout(120_000)  # the machine may be busy
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.on(
        "console",
        lambda message: troubles.append(message.text) if message.type == "error" else None,
    )
    yield page
    context.close()
    # A browser reports an answer that is no 200 by itself, whatever the page makes of it.
    known = ("status of 401", "ERR_", *expected)
    assert [each for each in troubles if not any(words in each for words in known)] == []
    assert all(any(words in each for each in troubles) for words in expected)


@pytest.fixture
def fresh() -> Iterator[Running]:
    with running(tiny_engine()) as it:
        yield it


def open_page(page: Page, server: Running) -> None:
    answer = page.goto(f"{server.url}/leyline")
    assert answer is not None
    assert answer.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]


def turn(page: Page, number: int) -> Any:
    return page.locator(f".turn[data-turn='{number}']")


def test_bars_appear_while_requests_run(page: Page, fresh: Running) -> None:
    open_page(page, fresh)
    page.get_by_text("No session yet").wait_for()
    assert f"{fresh.url}/v1" in page.locator("#example").inner_text()
    with fresh.http() as http:
        ask(http, "live", history(1))
        turn(page, 1).locator(".piece.computed").wait_for()
        assert page.locator("#empty").is_hidden()
        assert page.locator("#session-name").inner_text() == "live"
        ask(http, "live", history(3))
        ask(http, "live", history(3)[1:])
        turn(page, 3).locator(".piece.copied").wait_for()  # turn 1 ended in another way
        turn(page, 3).get_by_text("done: length").wait_for()
        numbers = page.locator(".turn").evaluate_all("all => all.map((each) => each.dataset.turn)")
        assert numbers == ["3", "2", "1"]
        # A second session is listed; the one that is looked at stays.
        ask(http, "second", history(1, 7))
        page.locator("#sessions button", has_text="second").wait_for()
        assert page.locator("#session-name").inner_text() == "live"
        page.locator("#sessions button", has_text="second").click()
        page.locator("#session-name", has_text="second").wait_for()
        turn(page, 1).wait_for()
        assert page.locator(".turn").count() == 1
        http.delete("/v1/leyline/sessions/second")
        page.get_by_text("Nothing is on record for this session").wait_for()
        assert page.locator(".turn").count() == 0
        ask(http, "second", history(1, 7))
        turn(page, 1).wait_for()
        page.get_by_text("Nothing is on record").wait_for(state="detached")


def touch(http: httpx.Client, session: str) -> None:
    """A request as small as can be."""
    body = {"prompt": [5, 6, 7], "max_tokens": 0, "leyline": {"session": session}}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_a_session_that_a_cut_list_leaves_out_is_still_shown(page: Page) -> None:
    with running(tiny_engine(max_sessions=MOST_SESSIONS + 50)) as server, server.http() as http:
        touch(http, "watched")
        page.goto(f"{server.url}/leyline#watched")
        turn(page, 1).wait_for()
        for i in range(MOST_SESSIONS):
            touch(http, f"other {i}")
        page.get_by_text("and 1 more").wait_for()
        page.get_by_text("Its sum is not listed").wait_for()
        assert turn(page, 1).is_visible()
        touch(http, "watched")
        turn(page, 2).wait_for()
        assert page.locator(".turn").count() == 2


def test_the_list_of_sessions_keeps_the_focus(page: Page, fresh: Running) -> None:
    focused = "document.activeElement.querySelector('bdi')?.textContent"
    with fresh.http() as http:
        touch(http, "first")
        touch(http, "second")
        open_page(page, fresh)
        entry = page.locator("#sessions button", has_text="first")
        entry.focus()
        touch(http, "third")
        page.locator("#sessions button", has_text="third").wait_for()
        assert page.evaluate(focused) == "first"
        touch(http, "first")  # which moves it to the top
        entry.get_by_text("2 turns").wait_for()
        assert page.evaluate(focused) == "first"
        names = page.locator("#sessions bdi").all_inner_texts()
        assert names == ["first", "third", "second"]
        page.keyboard.press("Enter")
        page.locator("#session-name", has_text="first").wait_for()
        http.delete("/v1/leyline/sessions/third")
        page.locator("#sessions button", has_text="third").wait_for(state="detached")
        assert page.locator("#sessions bdi").all_inner_texts() == ["first", "second"]


def test_a_fault_of_the_page_is_not_put_on_the_server(
    page: Page, fresh: Running, expected: list[str]
) -> None:
    expected.append("broken")
    page.add_init_script("Element.prototype.insertBefore = () => { throw new Error('broken'); };")
    with fresh.http() as http:
        touch(http, "some")
    open_page(page, fresh)
    page.get_by_text("This page failed (broken)").wait_for()
    assert "does not answer" not in page.locator("#state").inner_text()


def test_a_stream_that_the_page_can_not_follow_is_given_up(page: Page, fresh: Running) -> None:
    page.add_init_script("JSON.parse = () => { throw new Error('broken'); };")
    with page.expect_event("requestfailed", lambda request: "/events" in request.url):
        open_page(page, fresh)
    page.get_by_text("The server says what this page can't read (broken)").wait_for()


def test_the_sum_stays_when_a_session_begins_anew(page: Page, fresh: Running) -> None:
    """The list comes first, then the turns of another record: told together, without an end."""
    with fresh.http() as http:
        ask(http, "anew", history(1))
        fresh.settled()
        listed = http.get("/v1/leyline/sessions").json()
        told = http.get("/v1/leyline/turns", params={"session": "anew"}).json()
    later = {**told, "record": told["record"] + 1}
    said = [("sessions", listed), ("turns", told), ("sessions", listed), ("turns", later)]
    stream = "".join(f"event: {name}\ndata: {json.dumps(value)}\n\n" for name, value in said)
    page.route("**/v1/leyline/events*", lambda route: route.fulfill(body=stream))
    page.goto(f"{fresh.url}/leyline#anew")
    page.get_by_text("The server does not answer").wait_for()  # when all of it was read
    assert page.locator("#session-sum").inner_text().startswith("1 turn: ")
    assert turn(page, 1).is_visible()


def test_another_session_is_named_and_asked_for_at_once(page: Page) -> None:
    """Also while the server is away: without waiting for the next try."""
    page.add_init_script(
        "const later = window.setTimeout;"
        "window.setTimeout = (go, ms) => (ms >= 500 && ms <= 10_000 ? 0 : later(go, ms));"
    )
    with running(tiny_engine()) as server:
        with server.http() as http:
            for name in ("first", "second"):
                ask(http, name, history(1))
        page.goto(f"{server.url}/leyline#first")
        turn(page, 1).wait_for()
        page.locator("#session-sum", has_text="1 turn").wait_for()
    page.get_by_text("The server does not answer").wait_for()
    entry = page.locator("#sessions button", has_text="second")
    with page.expect_request(lambda asked: "session=second" in asked.url):
        entry.click()
    assert page.locator("#session-name").inner_text() == "second"
    assert page.locator("#sessions [aria-current=true]").all_inner_texts() == [entry.inner_text()]
    assert page.locator("#session-sum").inner_text() == ""
    assert page.locator(".turn").count() == 0


def test_the_text_is_reached_and_left_by_keyboard(page: Page, fresh: Running) -> None:
    with fresh.http() as http:
        run_agent(http, "keys", 2)
    open_page(page, fresh)
    focused = """() => {
        const it = document.activeElement;
        const place = [...it.parentElement.parentElement.querySelectorAll(".cell")].indexOf(it);
        return it.id || `${it.closest(".turn")?.dataset.turn}: ${place}`; }"""
    panel = page.locator("#panel")
    turn(page, 2).locator(".cell").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.evaluate(focused) == "panel-texts"
    page.locator("#panel-texts pre").first.wait_for()
    page.keyboard.press("Escape")
    assert panel.is_hidden() and page.evaluate(focused) == "2: 1"
    page.keyboard.press("Space")
    assert panel.is_visible() and page.evaluate(focused) == "panel-texts"
    page.keyboard.press("Shift+Tab")
    assert page.evaluate(focused) == "panel-close"
    page.keyboard.press("Enter")
    assert panel.is_hidden() and page.evaluate(focused) == "2: 1"
    # A click leaves the focus where it is.
    turn(page, 1).locator(".cell").first.click()
    assert panel.is_visible() and page.evaluate(focused) == "1: 0"


def test_widths_and_words_are_the_numbers(page: Page, fresh: Running) -> None:
    with fresh.http() as http:
        run_agent(http, "widths", 4)
        ask(http, "widths", history(4)[:-1], mode="repair", repair=30)
        told = turns_of(http, "widths")
    open_page(page, fresh)
    turn(page, 5).locator(".piece").first.wait_for()
    totals = {}
    for each in told:
        n = each["number"]
        parts = [*each["parts"], *each["evicted"]]
        totals[n] = sum(part["tokens"] for part in parts)
        drawn = turn(page, n).locator(".piece")
        tokens = drawn.evaluate_all("all => all.map((each) => Number(each.dataset.tokens))")
        assert sum(tokens) == totals[n]
        assert len(tokens) >= len(parts)
        widths = drawn.evaluate_all("all => all.map((e) => e.getBoundingClientRect().width)")
        # No piece is narrower than 2 px, which others have to make room for.
        for width, count in zip(widths, tokens, strict=True):
            assert width == pytest.approx(
                max(2.0, sum(widths) * count / totals[n]), abs=2.0 * len(widths)
            )
        classes = (
            turn(page, n)
            .locator(".piece")
            .evaluate_all("all => all.map((each) => each.classList[1])")
        )
        for kind in KINDS:
            shown = sum(t for t, c in zip(tokens, classes, strict=True) if c == kind)
            of_it = [p["tokens"] for p in parts if p.get("kind", "evicted") == kind]
            assert shown == sum(of_it), kind
        report = each["report"]["tokens"]
        words = turn(page, n).locator(".facts").inner_text()
        for name in ("shared", "moved", "computed"):
            assert f"{name} {report[name]:,}" in words
        assert f"a prefix cache would have computed {each['prefix_cache_computed']:,}" in words
        assert "First token after" in words
        assert ("Policy clear_tool_outputs" in words) == (n < 5)
    bars = {
        n: turn(page, n).locator(".bar").evaluate("bar => bar.getBoundingClientRect().width")
        for n in totals
    }
    longest = max(totals, key=lambda n: totals[n])
    for n, width in bars.items():
        assert width / bars[longest] == pytest.approx(totals[n] / totals[longest], abs=0.01)
    # The same as a table, for who does not see bars.
    turn(page, 5).locator("summary").click()
    cells = turn(page, 5).locator("td.number").all_inner_texts()
    drawn = turn(page, 5).locator(".piece").evaluate_all("all => all.map((e) => e.dataset.tokens)")
    assert [cell.replace(",", "") for cell in cells] == drawn


def test_hover_focus_and_tap_show_the_message(page: Page, fresh: Running) -> None:
    with fresh.http() as http:
        ask(http, "look", history(2))
        changed = history(2)
        changed[2] = {"role": "tool", "content": "now it says this"}
        ask(http, "look", changed)
    open_page(page, fresh)
    panel = page.locator("#panel")
    turn(page, 2).locator(".piece.shared .cell").first.hover()
    page.locator("#panel-texts pre", has_text=history(2)[0]["content"]).wait_for()
    assert "message 1, system" in page.locator("#panel-what").inner_text()
    # By keyboard: one stop for each bar, arrows within it and between bars.
    page.keyboard.press("Escape")
    assert panel.is_hidden()
    first = turn(page, 2).locator(".cell").first
    first.focus()
    assert panel.is_visible()
    stops = turn(page, 2).locator(".cell[tabindex='0']")
    assert stops.count() == 1
    page.keyboard.press("ArrowRight")
    page.locator("#panel-texts pre", has_text=history(2)[1]["content"]).wait_for()
    page.keyboard.press("End")  # the last turn's answer, which this prompt does not have
    what = page.locator("#panel-what")
    assert what.inner_text().startswith("evicted: ")
    page.keyboard.press("ArrowLeft")
    assert what.inner_text().startswith("the opening of the answer: 1 token computed")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.closest('.turn').dataset.turn") == "1"
    page.keyboard.press("Escape")
    # By tap, and with the panel's own buttons.
    turn(page, 2).locator(".piece.evicted .cell").first.click()
    assert what.inner_text().startswith("evicted: ") and "replaced by" in what.inner_text()
    page.locator("#panel-texts pre", has_text=history(2)[2]["content"][:40]).wait_for()
    page.locator("#panel-after").click()
    page.locator("#panel-texts pre", has_text="now it says this").first.wait_for()


def test_forgotten_text_leaves_the_page(page: Page, fresh: Running) -> None:
    secret = history(2)[2]["content"]
    with fresh.http() as http:
        ask(http, "forget", history(2))
        open_page(page, fresh)
        cells = turn(page, 1).locator(".cell")
        cells.nth(2).click()
        page.locator("#panel-texts pre", has_text=secret).wait_for()
        ask(http, "forget", [*history(2)[:2], *history(2)[3:]], mode="forget")
        turn(page, 1).get_by_text("text forgotten").wait_for()
    page.get_by_text("Its text was forgotten").first.wait_for()
    assert secret not in page.content()
    turn(page, 2).locator(".piece.evicted .cell").first.click()
    page.get_by_text("It was to be forgotten").wait_for()


def test_hostile_names_and_texts_are_text(page: Page, fresh: Running) -> None:
    messages = [{"role": "user", "content": HOSTILE}]
    with fresh.http() as http:
        ask(http, HOSTILE, messages)
    open_page(page, fresh)
    page.locator("#session-name").get_by_text(HOSTILE).wait_for()
    assert page.locator("#sessions bdi").inner_text() == HOSTILE
    turn(page, 1).locator(".cell").first.hover()
    page.locator("#panel-texts pre", has_text=HOSTILE).wait_for()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 1
    # Also from the address.
    page.goto("about:blank")
    page.goto(f"{fresh.url}/leyline#<img src=x onerror=alert(1)>")
    page.locator("#session-name", has_text="<img src=x onerror=alert(1)>").wait_for()
    assert page.locator("img").count() == 0
    page.goto("about:blank")
    page.goto(f"{fresh.url}/leyline#%E0%A4%A")
    page.locator("#session-name").get_by_text(HOSTILE).wait_for()


def test_the_key_is_asked_for_and_kept_in_the_tab(page: Page) -> None:
    settings = Settings(api_keys=("key-ä", "key-b"))
    with running(tiny_engine(), settings) as server:
        with server.http("key-b") as http:
            ask(http, "guarded", history(1))
        open_page(page, server)
        page.get_by_label("API key").wait_for()
        assert "guarded" not in page.content() and page.locator("#look").is_hidden()
        page.get_by_label("API key").fill("wrong")
        page.get_by_role("button", name="Look inside").click()
        page.get_by_text("not one of this server's").wait_for()
        page.get_by_label("API key").fill("key-b")
        page.keyboard.press("Enter")
        turn(page, 1).wait_for()
        assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
        assert "key-b" not in page.url
        page.reload()
        turn(page, 1).wait_for()
        page.get_by_role("button", name="Forget the key").click()
        page.get_by_label("API key").wait_for()
        assert page.evaluate("sessionStorage.length") == 0
        assert "guarded" not in page.content().replace("#guarded", "")
        # The other key sees its own sessions only.
        page.get_by_label("API key").fill("key-ä")
        page.keyboard.press("Enter")
        page.get_by_text("Live").wait_for()
        assert page.locator(".turn").count() == 0


def test_a_server_that_goes_away_is_said_to(page: Page) -> None:
    with running(tiny_engine()) as server:
        with server.http() as http:
            ask(http, "left", history(1))
        open_page(page, server)
        turn(page, 1).wait_for()
    page.get_by_text("The server does not answer").wait_for()
    assert turn(page, 1).is_visible()


def test_a_phone_has_no_sideways_scroll(page: Page, fresh: Running) -> None:
    with fresh.http() as http:
        run_agent(http, "x" * 200, 3)
    page.set_viewport_size(PHONE)
    open_page(page, fresh)
    turn(page, 3).locator("summary").click()
    turn(page, 3).locator(".cell").first.click()
    page.locator("#panel-texts pre").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    beyond = page.locator("h1, h2, h3, p, button:not(.cell), pre, .bar").evaluate_all(
        "(all) => all.filter((e) => e.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert beyond == 0
    # What was tapped is not behind the panel.
    assert page.evaluate(
        "document.querySelector('.cell.active').getBoundingClientRect().bottom"
        " <= document.querySelector('#panel').getBoundingClientRect().top + 1"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_works_without_colour_vision(page: Page, fresh: Running, scheme: Any) -> None:
    with fresh.http() as http:
        run_agent(http, "seen", 3)
        body = {"prompt": [5, 6, 7], "max_tokens": 0}
        failing = {
            **body,
            "leyline": {"session": "seen", "strict": True, "directives": [[0, 9**9]]},
        }
        assert http.post("/v1/completions", json=failing).status_code == 400
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    open_page(page, fresh)
    turn(page, 3).locator(".cell").first.hover()
    page.locator("#panel-texts pre").first.wait_for()
    texts = "h1, h2, h3, p, small, code, pre, button:not(.cell), summary, .badge, .letter, bdi"
    poor = page.evaluate(
        f"""(texts) => {{ {SEE}
        return [...document.querySelectorAll(texts)]
          .filter((e) => e.checkVisibility() && e.textContent.trim())
          .filter((e) => contrast(style(e).color, ground(e)) < 4.5)
          .map((e) => `${{e.tagName}} ${{e.className}} ${{e.textContent.slice(0, 30)}}`); }}""",
        texts,
    )
    assert poor == []
    swatches = page.evaluate(
        f"""() => {{ {SEE}
        const behind = style(document.body).backgroundColor;
        return [...document.querySelectorAll(".swatch")].map((e) => {{
          const edge = e.classList.contains("evicted");
          const colour = edge ? style(e).borderTopColor : style(e).backgroundColor;
          const pattern = [style(e).backgroundImage, style(e).borderTopStyle].join();
          const letter = e.querySelector(".letter").textContent;
          return [e.classList[1], contrast(colour, behind), pattern, letter]; }}); }}"""
    )
    kinds, contrasts, patterns, letters = zip(*swatches, strict=True)
    assert kinds == KINDS
    assert min(contrasts) >= 3
    assert len(set(patterns)) == len(set(letters)) == len(KINDS)
    # The bars look as the legend says, and say it to who does not look.
    for kind in ("shared", "moved", "computed", "evicted"):
        piece = turn(page, 3).locator(f".piece.{kind}").first
        image = "(e) => getComputedStyle(e).backgroundImage"
        assert piece.evaluate(image) == page.locator(f".swatch.{kind}").evaluate(image)
        label = piece.locator(".cell").first.get_attribute("aria-label")
        assert kind in label
    assert turn(page, 3).evaluate("(e) => getComputedStyle(e).animationName") == "none"
