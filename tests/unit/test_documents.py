"""Documents: relative links lead somewhere, command lines have options that exist, hosts.toml loads."""

import re
import shlex
from pathlib import Path

import click
import pytest

from patcher.cli import cli
from patcher.hosts_file import load_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path.relative_to(ROOT)
    for folder in (".", "docs", "docs/gpu", "configs/ansible", "scripts/gpu", "tests/models")
    for path in sorted((ROOT / folder).glob("*.md"))
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
TOML = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document):
    text = (ROOT / document).read_text()
    for link in LINK.findall(BLOCK.sub("", text)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), link
        if anchor:
            assert anchor in _anchors(target.read_text()), link


def _anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_command_lines_have_options_that_exist(document):
    for line in _command_lines((ROOT / document).read_text()):
        command: click.Command = cli
        words = shlex.split(line, comments=True)
        for word in words[1:]:
            if isinstance(command, click.Group) and not word.startswith("-"):
                assert word in command.commands, line
                command = command.commands[word]
            elif word.startswith("-"):
                known = {name for param in command.params for name in param.opts} | {"-h", "--help"}
                assert word.partition("=")[0] in known, line


@pytest.mark.parametrize("document", ["README.md", "docs/services.md"])
def test_every_hosts_toml_loads(document, tmp_path):
    blocks = TOML.findall((ROOT / document).read_text())
    assert blocks
    for block in blocks:
        path = tmp_path / "hosts.toml"
        path.write_text(block)
        assert load_config(path)


def _command_lines(text: str) -> list[str]:
    """What documents say to type: lines of code blocks, and inline code, that begin with the program's name."""
    blocks = [line.removeprefix("$ ") for block in BLOCK.findall(text) for line in block.splitlines()]
    blocks = [re.sub(r"^(\w+=\S+ )+", "", line) for line in blocks]
    inline = re.findall(r"`(ddtree-patch [^`]+)`", BLOCK.sub("", text).replace("\n", " "))
    return [line for line in (*blocks, *inline) if line.startswith("ddtree-patch ")]
