"""The page to play with, in a headless Chromium: its model is JAX's, and people can use it."""

import base64

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from docs.play.make import ENCODINGS, MODELS
from tests import browser
from tests.paths import ROOT
from train.evaluation import inside
from train.training import shipped

PAGE = ROOT / "docs" / "play" / "index.html"
QUESTIONS = 48
TOLERANCE = 1e-3
WINDOWS = {"phone": (390, 844), "desktop": (1280, 900)}
# All letters that there are, and one more.
TOO_LONG = "a b c d e f g h i j k l m n o p q r s t u v w x y z A B C D E F a"
# What is typed, and words of the sentence beside the field.
WRONG = {
    " ": "Type a list",
    "c b 7 +1 b?": "offsets +1 to +8, not “7”",
    "c b ß a +1 b?": "“ß” is not a token",
    "c b a +9 b?": "offsets +1 to +8, not “+9”",
    "c b a +1 G?": "“G?” is not a token",
    f"{TOO_LONG} +1 a?": "33 tokens; at most 32",
    "c b c a +1 b?": "“c” stands in the list twice",
    "c b a +1 d?": "“d” is not in the list",
    "c b a +2 b?": "beyond the list: only 1 token follows b",
    "c b a +1 a?": "beyond the list: no tokens follow a",
    "c b a": "end with one offset and one token",
    "c b a b?": "end with one offset and one token",
    "+1 b?": "end with one offset and one token",
    "c b a +1 c? +1 b?": "one question at a time",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or ""),
]


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    """A window of a desktop's size."""
    with browser.browser(tmp_path_factory.mktemp("browser") / "driver.log") as opened:
        opened.resize(*WINDOWS["desktop"])
        yield opened


@pytest.fixture
def page(window):
    """The page, opened anew."""
    window.open(PAGE)
    return window


def asked(task):
    """Held-out questions of all offsets and of lists of 10 to 32 tokens: the tokens of each."""
    lengths = np.linspace(task.shortest, task.symbols, QUESTIONS // task.offsets).astype(int)
    cells = [(k, n) for n in lengths for k in range(1, task.offsets + 1)]
    return [task.ask(cell, 1, seed).symbols[0, 0, :-1] for seed, cell in enumerate(cells)]


@pytest.mark.parametrize("update", [True, False], ids=["update", "cut"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_logits_are_those_of_jax(page, name, update):
    trained = shipped.read(MODELS / f"{name}.js")
    texts = asked(trained.experiment.task)
    assert len(texts) == QUESTIONS
    ends = np.array([np.flatnonzero(text)[-1] + 1 for text in texts])
    tokens = np.zeros((len(texts), ends.max()), np.int32)
    for row, text, end in zip(tokens, texts, ends, strict=True):
        row[:end] = text[:end]
    changed = None if update else inside.untrained(trained)
    model = changed or trained
    logits = model.apply(model.variables, jnp.asarray(tokens))[np.arange(len(texts)), ends - 1]
    found = page.run(
        "const [name, texts, update] = arguments;"
        "return texts.map((text) => models[name].run(text, {update}).logits)",
        name,
        [row[:end].tolist() for row, end in zip(tokens, ends, strict=True)],
        update,
    )
    chex.assert_trees_all_close(np.array(found), np.asarray(logits), atol=TOLERANCE)


@pytest.mark.parametrize("name", ENCODINGS)
def test_attention_and_states_are_those_of_jax(page, name):
    trained = shipped.read(MODELS / f"{name}.js")
    task = trained.experiment.task
    text = task.ask((5, task.longest), 1, 0).symbols[0, 0, :-1]
    tokens = text[text != 0]
    seen = inside.look(trained.model, trained.variables, tokens[None], [[""] * len(tokens)])
    layers = page.run("return models[arguments[0]].run(arguments[1]).layers", name, tokens.tolist())
    attention = np.array([layer["attention"] for layer in layers])
    chex.assert_trees_all_close(attention, seen.maps[:, 0], atol=TOLERANCE)
    e = seen.flat_states[:, 0]
    e = e / np.linalg.norm(e, axis=-1, keepdims=True)
    pointing = np.einsum("lthd,shd->lths", e, e[0])
    found = np.array([layer["pointing"] for layer in layers])
    chex.assert_trees_all_close(found, pointing, atol=TOLERANCE)


def test_numbers_of_16_bits_are_read_as_numpy_reads_them(page):
    numbers = np.array([0, -0.0, 1, -1.5, 6e-8, -6e-5, 65504, 1 / 3], "<f2")
    text = base64.b64encode(numbers.tobytes()).decode()
    found = page.run("return Array.from(decodeHalf(arguments[0]))", text)
    chex.assert_trees_all_equal(np.array(found), numbers.astype(float))


def test_answers_and_says_whether_it_is_right(page):
    page.type_into("#question", "q d m c x a k f t b h z +5 c?")
    assert "TAPE answers t with probability" in page.text("#answer")
    assert "That is right." in page.text("#answer")
    assert "In layer 1 the heads of c? (place 14) attend most to" in page.text("#summary")
    assert page.run("return document.querySelectorAll('label.column').length") == 14


def test_what_is_drawn_is_what_the_model_did(page):
    """The cells of a layer have the numbers of that layer, those of the answer its own."""
    page.run("document.querySelector('#layer').value = 2; drawLayer()")
    titles, expected = page.run(
        "const row = shown.result.layers[1].attention[shown.token][0];"
        "const cells = document.querySelectorAll('label.column .attention:nth-child(3)');"
        "return [[...cells].map((x) => x.title.split(': ')[1]), row.map(percent)]"
    )
    assert titles == expected
    assert "In layer 2" in page.text("#summary")


def test_says_what_is_wrong_with_a_question(page):
    for text, problem in WRONG.items():
        assert page.text("#answer")
        page.type_into("#question", text)
        assert problem in page.text("#problem"), text
        assert page.run("return question.getAttribute('aria-invalid')") == "true"
        drawn = page.run(
            "return [answer, summary, grid].map((x) => x.textContent).join('') + !result.hidden"
        )
        assert drawn == "false", "nothing of the question before may still be drawn"
        page.run("question.value = ''")
        page.type_into("#question", "c b a k m f +2 b?")
        assert page.text("#problem") == ""
        assert "answers" in page.text("#answer")


def test_is_used_by_the_keyboard_alone(page):
    def focused():
        return page.run("const e = document.activeElement; return e.id || e.value || e.tagName")

    reached = []
    for _ in range(8):
        page.press("tab")
        reached.append(focused())
    assert reached == ["question", "short", "long", "tape", "cut", "layer", "13", "SUMMARY"]
    page.run("layer.focus()")
    page.press("right")
    assert page.text("#layer-number") == "2 of 3"
    page.press("tab", "left")
    assert page.run("return shown.token") == 12
    assert "heads of +5 (place 13) attend" in page.text("#summary")
    page.run("document.querySelector('#cut').focus()")
    page.press("space")
    assert "TAPE without its update answers" in page.text("#answer")
    assert page.run("return shown.token") == 12
    page.run("document.querySelector('[value=tape]').focus()")
    page.press("right")
    assert "RoPE answers" in page.text("#answer")
    assert page.run("return cut.disabled")
    page.run("long.focus()")
    page.press("space")
    assert page.run("return shown.question.list.length") == 32


def test_cut_off_states_point_at_their_own_place(page):
    page.run("cut.click()")
    for layer in range(3):
        own = page.run(
            "return shown.result.layers[arguments[0]].pointing.map((heads, t) => heads[0][t])",
            layer,
        )
        chex.assert_trees_all_close(np.array(own), np.ones(len(own)), atol=1e-6)


def test_every_control_has_a_name(page):
    nodes = page.devtools("Accessibility.getFullAXTree", {})["nodes"]
    controls = {"textbox", "button", "radio", "checkbox", "slider"}
    named = {
        role: [node["name"]["value"] for node in nodes if node["role"].get("value") == role]
        for role in controls
    }
    assert named["textbox"] == ["List and question"]
    assert named["slider"] == ["Layer"]
    assert len(named["radio"]) == 2 + 14
    assert all(name for names in named.values() for name in names), named


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", WINDOWS)
def test_fits_the_window(window, size, scheme):
    window.resize(*WINDOWS[size])
    window.prefer(scheme)
    try:
        window.open(PAGE)
        window.run("document.querySelector('details').open = true; randomQuestion(32)")
        width = WINDOWS[size][0]
        assert window.run("return document.documentElement.scrollWidth") <= width
        rights = window.run(
            "return [...document.querySelectorAll('main *')]"
            ".map((x) => [x.outerHTML.slice(0, 80), x.getBoundingClientRect().right])"
        )
        assert [name for name, right in rights if right > width + 0.5] == []
        smallest = window.run(
            "return Math.min(...[...document.querySelectorAll('.token')].slice(1)"
            ".map((x) => parseFloat(getComputedStyle(x).fontSize)))"
        )
        assert smallest >= 12
        ground = window.run("return getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    finally:
        window.resize(*WINDOWS["desktop"])
        window.prefer("light")
