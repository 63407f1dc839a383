"""Write the page of examples, docs/examples.md, from the tested cases: `python -m tests.examples.page`."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.examples.cases import CASES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "examples.md"
HEAD = """# Examples of own code, and their verdicts

`python -m tests.examples.page` generates this page from the tested examples. Each file under a lab below has a correct implementation, and
most have classes with one bug each. Run them from the root of the repository, with the command in the first lines of the file:

```
kit run offload --set implementation=docs.examples.repointed:Repointed
```

`passes`: no check fails, and all checks are measured that are measured for the kit's own code, except `restore_failure_is_clean`.
[Other files](#other-files) are listed at the end.
"""
OTHERS = """
## Other files
These have no verdict here; the first lines of most say how to run them.

| file | what it is |
|---|---|
"""


def text() -> str:
    """The page: by lab and file, what each class does, and the check that fails; then the files that no case names."""
    page, section = HEAD, ("", "")
    for case in CASES:
        module, _, name = case.code.partition(":")
        if case.lab != section[0]:
            page += f"\n## The {case.lab} lab\n"
        if (case.lab, module) != section:
            page += f"\n| [{module}.py](examples/{module}.py) | what it does | verdict |\n|---|---|---|\n"
            section = (case.lab, module)
        classes = ast.parse((ROOT / "docs" / "examples" / f"{module}.py").read_text()).body
        (body,) = (node for node in classes if isinstance(node, ast.ClassDef) and node.name == name)
        does = (ast.get_docstring(body) or "").partition("\n")[0]
        page += f"| `{name}` | {does} | {f'`{case.fails}` fails' if case.fails else 'passes'} |\n"
    tested = {case.code.partition(":")[0] for case in CASES}
    page += OTHERS
    for file in sorted((ROOT / "docs" / "examples").glob("*.py")):
        if file.stem not in tested:
            what = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]
            page += f"| [{file.name}](examples/{file.name}) | {what} |\n"
    return page


if __name__ == "__main__":
    PAGE.write_text(text())
