"""Builds the site of the documentation: ``scripts/docs`` calls it, with the extra ``docs`` at hand.

    python scripts/build_docs.py FOLDER

The site has the README as its front page, the pages of ``examples/``, and a reference of all public names, from their
docstrings. Every warning is an error, a dead link among them.

Nothing is executed: a page has its cells' outputs in its text, and ``tests/test_pages.py`` holds them. So no kernel is
needed, and no MyST-NB: ``myst_parser`` reads the pages.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from error_texts import KINDS_OF_ERRORS, error_sites
from run_pages import CELL

ROOT = Path(__file__).resolve().parents[1]
MODULES = {
    "torchdistinput": "all that a training script needs",
    "torchdistinput.readers": "the formats of files",
    "torchdistinput.statistics": "what `analyze` computes",
    "torchdistinput.preprocessing": "Keras's preprocessing layers as modules",
    "torchdistinput.testing": "ranks, and the contract of a source, for tests",
    "torchdistinput.integrations.accelerate": "for accelerate",
    "torchdistinput.integrations.datasets": "for Hugging Face's `datasets`",
    "torchdistinput.integrations.transformers": "for transformers' `Trainer`",
}
STYLE = """
.content { width: 54em; }
.output.highlight-text .highlight, .output .highlight { background: none; border-left: 3px solid #8883; }
table.docutils { font-size: 0.85em; }
"""
PAGE = """
{{ name | escape | underline }}

.. auto{{ objtype }}:: {{ fullname }}
{% if objtype == "class" %}   :members:
{% elif objtype == "exception" %}   :members:
   :show-inheritance:
{% endif %}
"""
"""A page of the reference."""
ADAPTED = ["accelerate", "datasets", "transformers"]  # packages whose adapters are described without them
TENSORFLOW = ["examples/guide", "examples/strategy"]
FOLDERS = {"By symptom": "symptoms", "My data": "my_data", "My trainer": "my_trainer"}


def build(site: Path) -> None:
    """Builds the site into a folder, which is emptied first.

    Raises:
      SystemExit: the folder is in this repository, or a warning came.
    """
    if site.resolve().is_relative_to(ROOT):
        raise SystemExit(f"{site} is in the repository; nothing built belongs there. Name a folder outside of it.")
    from sphinx.ext.autodoc.mock import mock  # noqa: PLC0415 - tests look at this module without the extra

    shutil.rmtree(site, ignore_errors=True)
    with mock(ADAPTED), tempfile.TemporaryDirectory(prefix="docs-") as place:
        source = Path(place, "source")
        shutil.copytree(ROOT / "examples", source / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        write_front(source)
        write_reference(source / "reference")
        run_sphinx(source, site, Path(place, "doctrees"))


# ----------------------------------------------------------------------------------------------------------- the pages


def pages_in(folder: str) -> list[str]:
    """The pages of a folder of ``examples/``; the one that shows them comes first."""
    found = sorted((ROOT / "examples" / folder).glob("*.md"), key=lambda path: (path.stem != "index", path.stem))
    names = [path.relative_to(ROOT).with_suffix("").as_posix() for path in found if path.stem != "README"]
    return [name for name in names if name not in TENSORFLOW]


def navigation() -> dict[str, list[str]]:
    """What the navigation shows: the documents below each title."""
    shown = {title: pages_in(folder) for title, folder in FOLDERS.items()}
    shown |= {"More": pages_in(""), "Reference": ["reference/index", "reference/errors"]}
    return {"Contents": ["examples/index"], "TensorFlow": TENSORFLOW, **shown}


def write_front(source: Path) -> None:
    """Writes the front page: the README, and what the navigation shows."""
    text = (ROOT / "README.md").read_text().replace("examples/README.md", "examples/index.md")
    for title, names in navigation().items():
        entries = "\n".join(names)
        text += f"\n```{{toctree}}\n:caption: {title}\n:hidden:\n\n{entries}\n```\n"
    (source / "index.md").write_text(text)
    (source / "_static").mkdir()
    (source / "_static" / "site.css").write_text(STYLE)
    (source / "_templates" / "autosummary").mkdir(parents=True)
    for name in ("base", "class"):
        (source / "_templates" / "autosummary" / f"{name}.rst").write_text(PAGE)
    (source / "examples" / "README.md").rename(source / "examples" / "index.md")
    for page in (source / "examples").rglob("*.md"):
        text = page.read_text().replace("../README.md", "../index.md").replace("](README.md", "](index.md")
        page.write_text(CELL.sub(shown, text))


def shown(cell: re.Match[str]) -> str:
    """A cell as the site shows it: commands and files without the marks of notebooks, and what it prints."""
    first, _, rest = cell["code"].partition("\n")
    if first.startswith("%%writefile "):
        block = f"```{{code-block}} python\n:caption: {first.split()[1]}\n\n{rest}```\n"
    elif first.startswith("!"):
        block = f"```sh\n{cell['code'].replace('!', '')}```\n"
    else:
        block = f"```python\n{cell['code']}```\n"
    return (
        block if cell["output"] is None else f"{block}\n```{{code-block}} text\n:class: output\n\n{cell['output']}```\n"
    )


# ------------------------------------------------------------------------------------------------------- the reference


def names_of(name: str) -> list[str]:
    """The public names of a module; ``readers`` and ``preprocessing`` are attributes of the package."""
    package = importlib.import_module("torchdistinput")
    last = name.removeprefix("torchdistinput.")
    module = getattr(package, last) if last in package.__all__ else importlib.import_module(name)
    told = getattr(module, "__all__", None)
    if told is None:
        told = [each for each, thing in vars(module).items() if getattr(thing, "__module__", None) == module.__name__]
    return sorted(each for each in told if not each.startswith("_") and f"{name}.{each}" not in MODULES)


def write_reference(folder: Path) -> None:
    """Writes the index of all public names, from which Sphinx makes a page for each, and the errors."""
    folder.mkdir(parents=True)
    text = "Reference\n=========\n\nEvery public name, from its docstring.\n"
    for name, about in MODULES.items():
        title = f"``{name}``: {about}"
        names = "\n".join(f"   {name}.{each}" for each in names_of(name))
        text += f"\n{title}\n{'-' * len(title)}\n\n.. autosummary::\n   :toctree:\n   :nosignatures:\n\n{names}\n"
    (folder / "index.rst").write_text(text)
    (folder / "errors.md").write_text(errors_page())


# ---------------------------------------------------------------------------------------------------------- the errors


def errors_page() -> str:
    """The messages: what each says was found and needed, and what to write."""
    lines = ["# Errors", "", "The error messages of the library, from its code. `…` stands for a value."]
    lines += ["A message says what was found, what was needed, and what to write instead.", ""]
    errors = importlib.import_module("torchdistinput.errors")
    texts: dict[str, dict[str, set[str]]] = {}
    for site in error_sites(ROOT):
        if site.text:
            texts.setdefault(site.kind, {}).setdefault(site.text, set()).add(site.module)
    for kind in KINDS_OF_ERRORS:
        about = getattr(errors, kind, None)
        told = "Python's own." if about is None else first_sentence(about)
        lines += [f"## `{kind}`", "", told, ""]
        for text, modules in sorted(texts.get(kind, {}).items()):
            lines += [f"- {plain_markdown(text)} *({', '.join(sorted(modules))})*"]
        lines.append("")
    return "\n".join(lines)


def first_sentence(thing: object) -> str:
    """The first sentence of a docstring."""
    paragraph = (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.:])\s", paragraph)[0]


def plain_markdown(text: str) -> str:
    """A text that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]<>$|~#])", r"\\\1", " ".join(text.split()))


# ------------------------------------------------------------------------------------------------------------- Sphinx


def settings() -> dict[str, Any]:
    """The configuration of Sphinx."""
    return {
        "project": "torchdistinput",
        "extensions": ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"],
        "templates_path": ["_templates"],
        "html_theme": "furo",
        "html_title": "torchdistinput",
        "html_copy_source": False,
        "html_static_path": ["_static"],
        "html_css_files": ["site.css"],
        "myst_heading_anchors": 4,
        "exclude_patterns": ["**/__pycache__"],
        "autodoc_mock_imports": ADAPTED,
        "autodoc_typehints": "signature",
        "autodoc_typehints_format": "short",
        "autodoc_member_order": "bysource",
        "autodoc_class_signature": "mixed",
        "napoleon_google_docstring": True,
        "nitpicky": True,
        # Types of others, which only their own sites describe; private types, which signatures name in short.
        "nitpick_ignore_regex": [(r"py:.*", r"(?!torchdistinput\.\w+$).*")],
        "suppress_warnings": ["config.cache"],
        "python_use_unqualified_type_names": True,
    }


def as_restructured_text(_app: Any, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """Marks the code in a docstring: a block of four blanks after a paragraph."""
    for place in reversed(range(2, len(lines))):
        before, gap, line = lines[place - 2 : place + 1]
        if line.startswith("    ") and not gap and before[:1].strip():
            lines[place:place] = ["::", ""]


def run_sphinx(source: Path, site: Path, doctrees: Path) -> None:
    """Lets Sphinx make the site.

    Raises:
      SystemExit: a warning came.
    """
    from sphinx.application import Sphinx  # noqa: PLC0415 - tests look at this module without the extra
    from sphinx.util.docutils import docutils_namespace, patch_docutils  # noqa: PLC0415

    with patch_docutils(), docutils_namespace():
        app = Sphinx(source, None, site, doctrees, "html", settings(), warningiserror=True, status=None)
        app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon
        app.build()
    if app.statuscode:
        raise SystemExit(app.statuscode)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
