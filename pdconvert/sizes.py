"""Sizes in words."""

UNITS = ("kB", "MB", "GB", "TB")


def size_text(size_bytes: int) -> str:
    """Give a size to three digits in decimal units: 1234567 is "1.23 MB"."""
    if abs(size_bytes) < 1000:
        return f"{size_bytes} B"
    power = min((len(str(abs(size_bytes))) - 1) // 3, len(UNITS))
    return f"{size_bytes / 1000**power:.3g} {UNITS[power - 1]}"
