"""mkdocs hook: README on the first page, with links adapted to it, and a page per command of ``vescale-convert``."""

from __future__ import annotations

import html
import inspect
import re
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File

from vescale_fsdp.conversion.cli.commands import EXIT_CODES, SUMMARIES, cli

ROOT = Path(__file__).parents[2]
_PAGES = {
    "vescale_fsdp/DESIGN.md": "how_it_works.md",
    "checkpoint/FORMAT.md": "format.md",
    "CONTRIBUTING.md": "contribute.md",
    "CHANGELOG.md": "changes.md",
}


def on_config(config: Any) -> Any:
    """Add the commands to the navigation, before the API."""
    pages = [{name: f"commands/{name}.md"} for name in SUMMARIES]
    config.nav.insert(-1, {"Commands": [{"Overview": "commands/index.md"}, *pages]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page per command, and one that lists them."""
    rows = [f"| [`{name}`]({name}.md) | {summary} |" for name, (summary, _) in SUMMARIES.items()]
    overview = ["# Commands", "", "| `vescale-convert ...` | |", "|---|---|", *rows, "", EXIT_CODES]
    pages = {"index": "\n".join(overview)}
    pages |= {name: _command_page(name) for name in SUMMARIES}
    for name, text in pages.items():
        files.append(File.generated(config, f"commands/{name}.md", content=text))
    return files


def _command_page(name: str) -> str:
    """The page of a command: usage, description, examples, options and exit codes, as ``--help`` has them."""
    command = cli.commands[name]
    context = click.Context(command, info_name=f"vescale-convert {name}")
    usage = command.get_usage(context).removeprefix("Usage: ")
    options = (param for param in command.get_params(context) if isinstance(param, click.Option))
    records = [record for option in options if (record := option.get_help_record(context))]
    # A table's cells must not contain "|", not even in code.
    rows = [f"| <code>{_cell(names)}</code> | {_cell(text)} |" for names, text in records]
    examples = [f"vescale-convert {example}" for example in SUMMARIES[name][1]]
    return "\n".join(
        [
            *(f"# {name}", "", inspect.cleandoc(command.help or ""), ""),
            *("```sh", usage, "```", "", "Examples:", "", "```sh", *examples, "```", ""),
            *("| option | |", "|---|---|", *rows, "", EXIT_CODES),
        ]
    )


def _cell(text: str) -> str:
    return html.escape(text).replace("|", "&#124;")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert README at its marker in the first page."""
    if page.file.src_uri != "index.md":
        return markdown
    readme = (ROOT / "README.md").read_text()
    readme = re.sub(r"\]\(docs/", "](", readme)
    for source, target in _PAGES.items():
        readme = readme.replace(f"]({source})", f"]({target})")
    return markdown.replace("<!-- README -->", readme)
