"""Write docs/results.md and the README's tables from benchmarks/results/, and list the settings.

python -m benchmarks.report
"""

from benchmarks.report.page import PAGE, README, REFERENCE, page, readme, reference


def main() -> None:
    """Write the page, the README's tables, and the reference's list of settings."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
    README.write_text(readme(README.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the tables in {README}")
    REFERENCE.write_text(reference(REFERENCE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote the settings in {REFERENCE}")


if __name__ == "__main__":
    main()
