"""The documents: links lead somewhere, commands are ones that there are, and nothing public is left out."""

import ast
import dataclasses
import inspect
import re
import shlex
from pathlib import Path

import pytest

import resswap
from resswap.schemes import base

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "recipes/README.md"]
PUBLIC = sorted(resswap.__all__)


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def anchors(page):
    """The headings as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://|mailto:)([^)\s]+)\)", page.read_text())
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def commands():
    """Each command in a bash block of a page, as its words."""
    for page in PAGES:
        for block in blocks(page.read_text(), "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"\w+=\$\(", line):
                    continue
                words = shlex.split(line, comments=True)
                while words and re.fullmatch(r"\w+=.*", words[0]):  # settings of the environment
                    words.pop(0)
                if words:
                    yield pytest.param(words, id=f"{page.relative_to(ROOT)}: {' '.join(words[:3])}")


@pytest.mark.parametrize("words", commands())
def test_commands_are_ones_that_there_are(words):
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    extras = [extra for word in words for part in re.findall(r"\[(.+)\]", word) for extra in part.split(",")]
    for extra in extras:
        assert re.search(rf"^{extra} = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE), extra
    script = next((word for word in words if word.endswith(".py")), None)
    if script is None:
        assert words[0] in ("pip", "git", "resswap") or words[0].startswith(".venv/bin/"), words
        return
    options = (ROOT / script).read_text() + (ROOT / "recipes/arguments.py").read_text()
    for word in words[words.index(script) :]:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            assert re.search(rf'"--{name}"|^    {name}: ', options, re.MULTILINE), f"{script} has no --{name}"
        elif re.match(r"(recipes|tests|docs)/", word):
            assert (ROOT / word).exists(), word


def options_table(config):
    rows = [["option", "default", "allowed", "what it is"]]
    for field in dataclasses.fields(config):
        rows.append([f"`{field.name}`", f"`{field.default!r}`", field.metadata["allowed"], field.metadata["help"]])
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---|---|---|---|", *body])


@pytest.mark.parametrize("scheme", [s for s, c in base._SCHEMES.items() if c.__module__.startswith("resswap.")])
def test_every_scheme_is_on_its_page_with_every_option(scheme):
    config = resswap.available_schemes()[scheme]
    section = (ROOT / "docs/schemes.md").read_text().partition(f"### `{scheme}`\n")[2].partition("\n##")[0]
    assert section
    if dataclasses.fields(config):
        assert options_table(config) in section, f"it should have\n{options_table(config)}"


def test_no_public_name_is_missing_in_the_reference():
    listed = re.findall(r"^::: resswap\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_say_what_goes_in_and_comes_out(name):
    found = getattr(resswap, name)
    members = vars(found).items() if isinstance(found, type) else ()
    methods = [member for key, member in members if inspect.isfunction(member) and not key.startswith("_")]
    assert all(each.__doc__ for each in (found, *methods))
    if isinstance(found, type):
        return
    sections = re.split(r"^    (Args|Returns|Raises|Example):$", found.__doc__, flags=re.MULTILINE)
    texts = dict(zip(sections[1::2], sections[2::2], strict=True))
    described = re.findall(r"^        (\w+):", texts.get("Args", ""), re.MULTILINE)
    assert sorted(described) == sorted(inspect.signature(found).parameters)
    assert texts.get("Returns")
    assert texts.get("Raises") or name in ("added_parameters", "available_schemes", "option")


def test_the_changelog_has_the_version():
    versions = re.findall(r"^## \[(\d.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == resswap.__version__


def test_imports_go_one_way():
    """What a file imports stands in its own row of the table in CONTRIBUTING.md, or below."""
    rows = re.findall(r"^\| (`.*?`) \| ", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    row_of = {part: index for index, row in enumerate(rows) for part in re.findall(r"`resswap/(\w+)`", row)}
    checked = 0
    for file in ROOT.glob("resswap/**/*.py"):
        part = file.relative_to(ROOT / "resswap").parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) and node.level == 0 else ""
            names = [f"resswap.{alias.name}" for alias in node.names] if module == "resswap" else [module]
            for imported in [name.split(".")[1] for name in names if name.startswith("resswap.")]:
                assert row_of[imported] >= row_of[part], f"{file} imports {imported}"
                assert {part, imported} != {"surgery", "schemes"}, f"{file} imports {imported}"
                checked += 1
    assert checked > 50
