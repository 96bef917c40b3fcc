"""Just enough of JPEG's structure (ITU-T T.81, B.1 and B.2) to see whether a file was cut off."""

START, SCAN, END = b"\xff\xd8", b"\xff\xda", b"\xff\xd9"  # markers


def has_end(content: bytes) -> bool:
    """Whether a JPEG goes on to its end marker, whatever may follow; True for what is no JPEG at all.

    An end marker before the first scan is that of a preview within the metadata, and does not count.
    """
    if not content.startswith(START):
        return True
    at = len(START)
    while (marker := content[at : at + 2]) != SCAN:
        if not marker.startswith(b"\xff"):
            return False
        at += 2 + int.from_bytes(content[at + 2 : at + 4])  # a segment's length counts itself
    return content.find(END, at) >= 0
