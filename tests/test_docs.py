"""The documentation is true: its code runs, its commands parse, what it names is there."""

import contextlib
import doctest
import functools
import importlib
import inspect
import io
import json
import re
import shutil
import sys
import types
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import pytest
import yaml

import tape_jax
from docs import figures, symmetries
from research import evidence
from tape_jax import positions
from tape_jax._src.attention import BACKENDS
from tests import markdown
from tests.library.test_package import all_modules, public_modules
from tests.models import random_variables, small_model
from tests.paths import ROOT
from tests.selection import OF_EACH_SORT
from train import experiment, main
from train.commands import compare
from train.tasks import TASKS

LLAMA = ROOT / "tests" / "golden" / "hf" / "llama3_gqa"
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "examples/*.md",
        "research/*.md",
        "benchmarks/results/*.md",
    )
    for path in ROOT.glob(pattern)
)
# Pages whose code takes more than a few seconds.
SLOW = {
    "docs/encodings.md",
    "docs/experiments.md",
    "docs/howto/decode.md",
    "docs/howto/backend.md",
    "docs/howto/accelerators.md",
    "docs/howto/context.md",
    "docs/howto/encoding.md",
    "docs/howto/packing.md",
    "docs/howto/retrofit.md",
    "docs/howto/your_model.md",
}
# How many Python blocks a page may leave out, each with its reason.
NOT_RUN: dict[str, int] = {}
# Pages for contributors, and those about what the package does inside.
FOR_CONTRIBUTORS = {
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/decisions.md",
    "docs/howto/backend.md",
    "docs/kernels.md",
}
# Folders of runs, models and texts that commands make or read, and that are nobody's files here.
MADE = ("runs/", "checkpoints/", "books/", "dist/", "site/")


def name(path):
    return path.relative_to(ROOT).as_posix()


def read(path):
    return path.read_text(encoding="utf-8")


def python_blocks(path):
    return [block for block in markdown.blocks(read(path)) if block.language == "python"]


# What stands in the others was so on their day.
OF_TODAY = [path for path in PAGES if path.name != "CHANGELOG.md" and path.parent.name != "results"]

WITH_CODE = [path for path in PAGES if python_blocks(path)]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with what the pages take for granted: configs, examples and a small Llama folder."""
    for folder in ("configs", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    shutil.copytree(LLAMA, tmp_path / "checkpoints" / "llama-2-7b")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def page(monkeypatch):
    """The module that a page's code is, and may register things of; afterwards they are gone."""
    registries = (TASKS, positions.registry, BACKENDS)
    before = [dict(registry) for registry in registries]
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    yield vars(module)
    for registry, entries in zip(registries, before, strict=True):
        registry.clear()
        registry.update(entries)


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] if name(path) in SLOW else [])
        for path in WITH_CODE
    ],
    ids=name,
)
def test_code_prints_what_the_page_shows(path, workplace, page):
    for block in python_blocks(path):
        if block.reason:
            continue
        printed = io.StringIO()
        code = compile("\n" * (block.line - 1) + block.code, str(path), "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, page)
        assert printed.getvalue() == block.output, f"{name(path)}:{block.line}"


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("bias", jnp.ones((4, 4))),
        ("log_decay", jnp.ones((4, 2))),
        ("logit_softcap", 2.0),
        ("logits_fn", lambda logits, rows: 2 * logits),
        ("weights_fn", lambda logits, rows: jax.nn.sigmoid(logits)),
        ("mask", jnp.tri(4, dtype=bool)),
        ("query_offset", 1),
    ],
)
def test_the_backend_of_a_page_refuses_what_it_lacks(keyword, value, page):
    """It would leave it out in silence."""
    code = python_blocks(ROOT / "docs" / "howto" / "backend.md")[0].code
    exec(code, page)
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(NotImplementedError, match=keyword):
        tape_jax.attention(q, q, q, implementation="two_calls", **{keyword: value})


def test_functions_of_rows_on_a_page_have_gradients_where_no_key_is_seen(page):
    blocks = python_blocks(ROOT / "docs" / "howto" / "encoding.md")
    (code,) = (block.code for block in blocks if "def logits_fn" in block.code)
    page.update(jax=jax, jnp=jnp, tape=tape_jax)
    exec(code, page)
    x, mask = page["x"], jnp.tri(6, k=-1, dtype=bool)

    def total(gate):
        page["gate"] = gate
        functions = {name: page[name] for name in ("logits_fn", "weights_fn")}
        return tape_jax.attention(x, x, x, mask=mask, **functions)[0].sum()

    assert jnp.isfinite(jax.grad(total)(page["gate"])).all()


def test_what_is_not_run_is_counted():
    left_out = {name(p): sum(bool(b.reason) for b in python_blocks(p)) for p in WITH_CODE}
    assert {page: count for page, count in left_out.items() if count} == NOT_RUN
    assert {name(path) for path in WITH_CODE} >= SLOW


@pytest.mark.slow
def test_examples_in_docstrings(workplace):
    """With the usual modules, a RoPE model, its variables, tokens and a key at hand."""
    rope = small_model("rope", num_kv_heads=1)
    given = {
        "functools": functools,
        "jax": jax,
        "jnp": jnp,
        "tape": tape_jax,
        "Transformer": tape_jax.Transformer,
        "config": rope.config,
        "key": jax.random.key(0),
        "tokens": jnp.zeros((8, 8), jnp.int32),
        "model": rope,
        "variables": random_variables(rope),
    }
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    tests = {
        test.name: test
        for module in all_modules()
        for test in finder.find(module, extraglobs=given)
        if test.examples
    }
    assert {"tape_jax.adapt", "tape_jax._src.model.decoder.Transformer"} <= set(tests)
    for test in tests.values():
        runner.run(test)
    assert runner.failures == 0


@pytest.fixture
def llama(tmp_path):
    """What a config reads of the Llama that it adapts: a folder whose sizes are those of most."""
    folder = Path(shutil.copytree(LLAMA, tmp_path / "llama"))
    plain = {"rope_theta": 10_000.0, "rope_type": "default"}
    changed = {"vocab_size": 32_000, "rope_parameters": plain}
    sizes = {**json.loads(read(folder / "config.json")), **changed}
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


def check_command(words, commands, llama, monkeypatch):
    """A command passes its own parser, and its config loads."""
    module = importlib.import_module(commands[words[0]][0])
    parsed = []
    with monkeypatch.context() as patch:
        patch.setattr(module, "run", parsed.append)
        main._run(words, commands)
    (args,) = parsed
    config = getattr(args, "config", None)
    if config is not None:
        for chosen in variants(args):
            options = [*args.overrides, *chosen]
            if re.search(r"\badapt\b", " ".join([read(ROOT / config), *options])):
                options.append(f"--config.adapt.base={llama}")
            experiment.from_file(ROOT / config, options, report=lambda _: None)
    elif words[0] == "evidence":
        scale = f"--config.scale={evidence.scale_of(args.overrides)}"
        experiment.from_file(ROOT / "configs/bytes_demo.py", [scale])
    elif args.overrides:
        change = experiment.change if words[0] == "train" else experiment.change_evaluation
        configs = (ROOT / "configs").glob("[!_]*.py")
        assert any(accepts(path, change, args.overrides) for path in configs)


def variants(args):
    """What `compare` makes of a config: options of each variant."""
    if not any(getattr(args, option, None) for option in ("encodings", "methods")):
        return [[]]
    choice, names = compare.chosen(args)
    return [choice.overrides(name) for name in names]


def accepts(path, change, overrides):
    """Whether a run of a config takes these options once it is there."""
    try:
        change(experiment.from_file(path), overrides)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("path", OF_TODAY, ids=name)
def test_commands_exist(path, llama, monkeypatch):
    makefile = read(ROOT / "Makefile").replace("$(VENV)", ".venv")
    targets = set(re.findall(r"^([\w./-]+):", makefile, re.MULTILINE))
    extras = re.search(r"optional-dependencies\]\n(.*?)\n\[", read(ROOT / "pyproject.toml"), re.S)
    for words in markdown.commands(read(path)):
        said = " ".join(words)
        match words:
            case ["python", "-m", "train.main" | "research.main" as program, *rest]:
                if rest not in ([], ["COMMAND"]):
                    commands = importlib.import_module(program).COMMANDS
                    check_command(rest, commands, llama, monkeypatch)
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module), said
            case ["python", "-c", code]:
                compile(code, said, "exec")
            case ["python", file, *_]:
                assert (ROOT / file).is_file(), said
            case ["make", *given]:
                wanted = {word for word in given if "=" not in word}
                assert wanted <= targets, said
            case ["pip", "install", *what]:
                for extra in re.findall(r"\[([\w,]+)\]", " ".join(what)):
                    for one in extra.split(","):
                        assert re.search(rf"^{one} = ", extras[1], re.MULTILINE), said


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path):
    for link in markdown.links(read(path)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        assert target.exists(), link
        assert not anchor or anchor in markdown.anchors(read(target)), link


FILE = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*(?:/|\.(?:py|md|txt|toml|yml|png|npz))")


@pytest.mark.parametrize("path", OF_TODAY, ids=name)
def test_files_that_are_named_exist(path):
    tops = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")}
    elsewhere = [ROOT / "tape_jax" / "_src", path.parent]
    for span in markdown.spans(read(path)):
        if not FILE.fullmatch(span) or span.startswith(MADE) or "/" not in span:
            continue
        folders = [ROOT] if span.split("/")[0] in tops else elsewhere
        assert any(list(folder.glob(span.rstrip("/"))) for folder in folders), span


@functools.cache
def navigation():
    """The pages of the site's navigation, in order, and what it leaves out."""
    site = yaml.safe_load(read(ROOT / "mkdocs.yml"))

    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        return [
            x for e in (entry.values() if isinstance(entry, dict) else entry) for x in leaves(e)
        ]

    return leaves(site["nav"]), site["not_in_nav"].split()


def test_every_page_is_in_the_navigation():
    listed, beside = navigation()
    assert len(listed) == len(set(listed))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert pages <= {*listed, *beside}
    assert not set(listed) & set(beside)
    assert all((ROOT / "docs" / page).exists() or (ROOT / page).exists() for page in listed)


# Code and tables count too, but nothing without a letter or a digit, such as the lines of a table.
WORDS, WORDS_OF_A_HOWTO = 18_000, 1_200


def test_pages_for_users_are_short():
    pages = {page: ROOT / "docs" / page for page in navigation()[0] if page.endswith(".md")}
    words = {
        page: sum(re.search(r"\w", word) is not None for word in read(path).split())
        for page, path in pages.items()
        if path.exists()
    }
    assert sum(words.values()) <= WORDS
    howtos = {page: count for page, count in words.items() if page.startswith("howto/")}
    assert not {page: n for page, n in howtos.items() if n > WORDS_OF_A_HOWTO}


def reference_entries():
    """What has an entry in the reference, by name, and whether its members are shown."""
    found = {}
    for page in (ROOT / "docs" / "api").glob("*.md"):
        entries = re.findall(r"^::: ([\w.]+)\n    options: (.+)$", read(page), re.MULTILINE)
        for dotted, options in entries:
            assert dotted not in found, f"{dotted} has two entries"
            module, _, attribute = dotted.rpartition(".")
            value = getattr(importlib.import_module(module), attribute)
            found[dotted] = value, "members: false" not in options
    return found


def test_reference_is_exactly_what_is_public():
    """Functions and classes have one entry each; modules and constants are at least named."""
    entries = reference_entries()
    public = {module.__name__: module for module in public_modules()}
    for dotted in entries:
        module, _, name = dotted.rpartition(".")
        assert module in public, dotted
        assert name in public[module].__all__, dotted
    pages = {path.stem: read(path) for path in (ROOT / "docs" / "api").glob("*.md")}
    assert set(pages) == {name.removeprefix("tape_jax.") for name in public}
    for dotted, module in public.items():
        named = set(markdown.spans(pages[dotted.removeprefix("tape_jax.")]))
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value):
                count = sum(shown is value for shown, _ in entries.values())
                assert count == 1, f"{dotted}.{name} has {count} entries in docs/api/"
            else:
                assert name in named, f"{dotted}.{name} is not named on its page of docs/api/"


@pytest.mark.parametrize(
    "path", [path for path in PAGES if name(path) not in FOR_CONTRIBUTORS], ids=name
)
def test_pages_for_users_name_nothing_private(path):
    assert "_src" not in read(path)


def described(text, section):
    """The names that a section of a docstring describes."""
    found = re.search(
        rf"^{section}:\n((?:  .*\n|\n)+)", inspect.cleandoc(text) + "\n", re.MULTILINE
    )
    lines = re.findall(r"^  (\*{0,2}\w[\w, *]*):", found[1] if found else "", re.MULTILINE)
    return [name.strip("* ") for line in lines for name in line.split(",")]


def test_what_is_described_has_that_name():
    """Arguments of functions, and fields of classes that declare them."""
    for dotted, (value, with_members) in reference_entries().items():
        functions = {dotted: value} if inspect.isfunction(value) else {}
        if inspect.isclass(value):
            own = {n: f for n, f in vars(value).items() if inspect.isfunction(f)}
            functions |= {f"{dotted}.{n}": f for n, f in own.items()} if with_members else {}
        if inspect.isclass(value) and inspect.get_annotations(value):
            there = {n for c in value.__mro__ for n in (*vars(c), *inspect.get_annotations(c))}
            assert set(described(value.__doc__, "Attributes")) <= there, dotted
        for name, function in functions.items():
            names = described(inspect.getdoc(function) or "", "Args")
            taken = set(inspect.signature(function).parameters) - {"self"}
            assert not names or set(names) == taken, f"{name}: {taken.symmetric_difference(names)}"


def test_what_the_reference_shows_is_explained():
    for dotted, (value, with_members) in reference_entries().items():
        assert inspect.getdoc(value), dotted
        assert "_src" not in inspect.getdoc(value), dotted
        for name, member in vars(value).items() if with_members else ():
            if inspect.isfunction(member) and not name.startswith("_"):
                assert inspect.getdoc(getattr(value, name)), f"{dotted}.{name}"


@pytest.mark.slow
def test_pictures_can_be_drawn(tmp_path, capsys):
    importlib.import_module("docs.figures").main(["--out", str(tmp_path), "--steps", "1"])
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn < {path.name for path in (ROOT / "docs" / "images").glob("*.png")}
    assert {"idea_layer.png", "encodings.png", "results.png"} < drawn
    assert "nats per token" in capsys.readouterr().out


@pytest.mark.slow
def test_the_picture_of_a_question_shows_where_its_last_token_attends():
    """A distribution over tokens for every head; the first layer finds c, the second the answer."""
    attention, words = figures.pointing(), figures.QUESTION.split()
    assert attention.shape == (3, 4, len(words))
    chex.assert_trees_all_close(attention.sum(-1), jnp.ones((3, 4)), atol=1e-5)
    found = attention.max(1)
    assert found[0, words.index("c")] > 0.9
    assert found[1, words.index(figures.ANSWER)] > 0.9


SHORT = {
    "train.steps": 10,
    "train.batch_size": 4,
    "task.sequence_length": 32,
    "evaluation.tokens": 1024,
}
SHORTER = (
    '"--config.train.steps=60"',
    ", ".join(f'"--config.{field}={value}"' for field, value in SHORT.items()),
)


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/tutorials/*.ipynb")), ids=name)
def test_tutorials_print_what_they_show(path):
    """Shorter trainings and evaluations print the same."""
    cells = json.loads(read(path))["cells"]
    variables = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec("".join(cell["source"]).replace(*SHORTER), variables)
            shown = "".join("".join(output["text"]) for output in cell["outputs"])
            assert printed.getvalue() == shown


def test_table_of_encodings_is_of_the_registry():
    page = read(symmetries.PAGE)
    rows = symmetries.rows_of(page)
    assert list(rows) == list(positions.registry), "python -m docs.symmetries writes it"
    assert symmetries.with_rows(page, rows) == page
    named = set(markdown.spans(page))
    assert named >= set(positions.registry)
    chosen = read(ROOT / "docs" / "encodings.md").partition("## All of them")[2]
    lines = [line for line in chosen.splitlines() if line.startswith("| `")]
    in_lines = [name for line in lines for name in re.findall(r"`(\w+)`", line.split(" | ")[0])]
    ablations = {k for k, cls in positions.registry.items() if cls.__module__.endswith("ablations")}
    assert sorted(in_lines) == sorted({*positions.registry} - ablations)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OF_EACH_SORT)
def test_table_of_encodings_is_what_is_found(kind):
    assert symmetries.rows_of(read(symmetries.PAGE))[kind] == symmetries.row(kind)
