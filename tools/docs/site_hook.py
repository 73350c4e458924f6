"""mkdocs hook: README on the first page, a page per command, all public names, and tables that keep names whole."""

from __future__ import annotations

import html
import importlib
import inspect
import pkgutil
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
from mkdocs.exceptions import BuildError
from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parents[2]))

import vescale_fsdp
from tools.docs.command_examples import outputs
from vescale_fsdp.conversion.cli.commands import EXIT_CODES, SUMMARIES, cli

ROOT = Path(__file__).parents[2]
_PAGES = {
    "vescale_fsdp/DESIGN.md": "how_it_works.md",
    "checkpoint/FORMAT.md": "format.md",
    "CONTRIBUTING.md": "contribute.md",
    "CHANGELOG.md": "changes.md",
}


_LONG = 100  # rows of a table that a reader searches rather than reads


def on_config(config: Any) -> Any:
    """Add the commands to the navigation, and the link to the repository that the package's metadata name."""
    pages = [{name: f"commands/{name}.md"} for name in SUMMARIES]
    (convert,) = (group["Convert"] for group in config.nav if "Convert" in group)
    convert.append({"Commands": [{"Overview": "commands/index.md"}, *pages]})
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.repo_url = metadata.get("urls", {}).get("Repository")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page per command, and one that lists them."""
    rows = [f"| [`{name}`]({name}.md) | {summary} |" for name, (summary, _) in SUMMARIES.items()]
    overview = [
        "# Commands",
        "",
        "| `vescale-convert ...` | description |",
        "|---|---|",
        *rows,
        "",
        EXIT_CODES,
    ]
    pages = {"index": "\n".join(overview)}
    printed = outputs()
    pages |= {name: _command_page(name, *printed[name]) for name in SUMMARIES}
    for name, text in pages.items():
        files.append(File.generated(config, f"commands/{name}.md", content=text))
    return files


def _command_page(name: str, example: str, output: str) -> str:
    """The page of a command: what ``--help`` has, and what the first example prints for a model with two layers."""
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
            *(f"# vescale-convert {name}", "", inspect.cleandoc(command.help or ""), ""),
            *("```sh", usage, "```", "", "Examples:", "", "```sh", *examples, "```", ""),
            f"For a Llama with two small layers, `vescale-convert {example}` prints:",
            *("", "```text", *output.splitlines(), "```", ""),
            *("| option | description |", "|---|---|", *rows, "", EXIT_CODES),
        ]
    )


def _cell(text: str) -> str:
    return html.escape(text).replace("|", "&#124;<wbr>")


def _names() -> str:
    """The public names of every package, each with a link to its description."""
    pages = {}
    for file in sorted((ROOT / "docs" / "api").glob("*.md")):
        for name in re.findall(r"^(?:::: |### `)(vescale_fsdp\.[\w.]+)", file.read_text(), re.MULTILINE):
            pages[name] = f"{file.name}#{_documented(name)}"
        for name in re.findall(r"^### `(vescale_fsdp\.[\w.]+)", file.read_text(), re.MULTILINE):
            anchor = re.sub(r"[^\w-]", "", name).lower()  # as mkdocs makes it of a heading
            pages[name] = f"{file.name}#{anchor}"
    rows = []
    packages = (each.name for each in pkgutil.iter_modules(vescale_fsdp.__path__) if each.ispkg)
    for package in ("vescale_fsdp", *(f"vescale_fsdp.{name}" for name in packages)):
        names = getattr(importlib.import_module(package), "__all__", ())
        links = [f"[`{name}`]({pages[f'{package}.{name}']})" for name in names]
        rows += [f"* `{package}`: {', '.join(links)}"] if links else []
    return "\n".join(rows)


def _documented(name: str) -> str:
    """The name under which mkdocstrings finds a public name: of a function whose module has this name, too, its own."""
    path = Path(*name.split(".")).with_suffix(".py")
    if not (ROOT / path).exists():
        return name
    package, _, last = name.rpartition(".")
    function = inspect.unwrap(getattr(importlib.import_module(package), last))
    file = Path(inspect.getfile(function)).relative_to(ROOT)
    return ".".join((*file.with_suffix("").parts, last))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Insert README, the changes and the public names into their pages, and leave out titles that are for tests."""
    text = _filled(markdown, page)
    # A title tells tests why a block is not run. On the site it would be a bar above the block.
    return re.sub(r'^( *```\w+) title="not run by our tests:[^"]*"', r"\1", text, flags=re.MULTILINE)


def _filled(markdown: str, page: Any) -> str:
    match page.file.src_uri:
        case "index.md":
            page.meta["hide"] = ["navigation"]  # it would list this page alone
            front, install, rest = _adapted("README.md").partition("## Install")
            return "\n".join((front, markdown, install + rest))
        case "changes.md":
            return _adapted("CHANGELOG.md")
        case "families.md" | "plan.md" | "stacks.md":
            page.meta["hide"] = ["toc"]  # a wide table takes the room
        case "api/index.md":
            return markdown.replace("<!-- NAMES -->", _names())
        case uri if uri.startswith("api/"):
            return re.sub(
                r"^::: (vescale_fsdp\.[\w.]+)$",
                lambda line: line[0] if line[1] == "vescale_fsdp.errors" else f"::: {_documented(line[1])}",
                markdown,
                flags=re.MULTILINE,
            )
    return markdown


def _adapted(file: str) -> str:
    """The text of a file of the repository's root, with links for the site."""
    text = re.sub(r"\]\(docs/", "](", (ROOT / file).read_text())
    for source, target in _PAGES.items():
        text = text.replace(f"]({source})", f"]({target})")
    return text


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Prepare names and tables for narrow screens: names are not broken, and cells with sentences are not squeezed.

    Raises:
        BuildError: if a page of the API describes a module in place of a function of the same name.
    """
    if "doc-module" in html and page.file.src_uri != "api/errors.md":
        raise BuildError(f"{page.file.src_uri} describes a module; see _documented.")
    html = re.sub(r"<table>.*?</table>", lambda table: _readable(table[0]), html, flags=re.DOTALL)
    # Blocks of code stay as they are.
    parts = re.split(r"(<pre.*?</pre>|<table>.*?</table>)", html, flags=re.DOTALL)
    fits = 34  # characters, in a nested list on a narrow screen
    parts[::2] = [_with_whole_names(part, fits, fits) for part in parts[::2]]
    return re.sub(r"(?<=<h[34] ).*?(?=</h[34]>)", _breakable, "".join(parts), flags=re.DOTALL)


def _breakable(heading: re.Match[str]) -> str:
    """Let a heading's long names break behind dots and underscores."""
    return re.sub(r"(?<=>)[\w.]{30,}(?=<)", lambda name: re.sub(r"(?<=[._])", "<wbr>", name[0]), heading[0])


def _with_whole_names(html: str, most_of_names: int, most: int) -> str:
    """Mark words in inline code, which browsers must not break: names, and words of up to so many characters.

    Longer words may break behind punctuation, and long names in them behind dots and underscores.
    """

    def marked(word: re.Match[str]) -> str:
        limit = most_of_names if re.fullmatch(r"[\w.]+", word[0]) else most
        pieces = [word[0]]
        for behind in (r"(?<=[(\[{,=/|])", r"(?<=\.)", "(?<=_)"):
            pieces = [part for piece in pieces for part in _split(piece, behind, limit)]
        return "<wbr>".join(f'<span class="name">{piece}</span>' for piece in pieces if piece)

    # Tags other than <wbr> are references that are not resolved yet.
    return re.sub(
        r"(?<=<code>)([^<]|<wbr>)*(?=</code>)",
        lambda code: re.sub(r"(?<!\S)[^\s<>]+(?!\S)", marked, code[0]),
        html,
    )


def _split(piece: str, behind: str, limit: int) -> list[str]:
    return [piece] if len(piece) <= limit else re.split(behind, piece)


def _readable(table: str) -> str:
    """Mark the names of a table, and give cells a width that grows with their prose.

    A long table gets a box that filters its rows. On narrow screens, each row of a long table, and of one with three
    columns and prose, is a paragraph: the heads of columns are before the cells, and empty cells are left out.
    """

    def widened(cell: re.Match[str]) -> str:
        width_rem = min(20, len(re.sub(r"<code.*?</code>|<[^>]+>", "", cell[1])) // 6)
        return f'<td style="--prose: {width_rem}rem">{cell[1]}</td>' if width_rem > 8 else cell[0]

    heads = [re.sub(r"<[^>]+>|['\"]", "", head) for head in re.findall(r"<th[^>]*>(.*?)</th>", table)]
    style = "; ".join(f"--head-{place}: '{head}: '" for place, head in enumerate(heads, 1))
    rows = table.count("<tr>") - 1
    if rows >= _LONG:
        table = re.sub(r"<td>(<code>)?-(</code>)?</td>", '<td class="none">-</td>', table)
        box = f'<input type="search" placeholder="Filter {rows} rows" aria-label="Filter rows">'
        box = f"<label>{box}<output></output></label>"
        return f'<div class="long stacked" style="{style}">{box}\n{table}</div>'
    wide = re.sub(r"<td>(.*?)</td>", widened, table, flags=re.DOTALL)
    marked = _with_whole_names(wide, 60, 40)
    is_stacked = len(heads) >= 3 and wide != table
    return f'<div class="stacked" style="{style}">\n{marked}</div>' if is_stacked else marked
