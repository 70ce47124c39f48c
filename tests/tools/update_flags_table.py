"""Writes the table of engine flags in docs/serve.md anew: `python -m tests.tools.update_flags_table`."""

from __future__ import annotations

from pathlib import Path

from dsv4.config.engine_config import flags_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serve.md"
BEGIN, END = "<!-- engine flags: begin -->\n", "\n<!-- engine flags: end -->"


def main() -> None:
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(head + BEGIN + flags_table() + END + tail, encoding="utf-8")


if __name__ == "__main__":
    main()
