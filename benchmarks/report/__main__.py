"""Write docs/results.md, and the README's tables, from what is in benchmarks/results/.

python -m benchmarks.report
"""

from benchmarks.report.page import PAGE, README, page, readme


def main() -> None:
    """Write the page and the README's tables."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the tables in {README}")


if __name__ == "__main__":
    main()
