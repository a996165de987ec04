"""Write docs/results.md, the picture of a report, and the tables of the README and docs/method.md.

python -m benchmarks.report
"""

from benchmarks.report.page import files


def main() -> None:
    """Write every file that is made from results or constants."""
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
