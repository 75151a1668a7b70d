"""What goes wrong with a text on its way, and what someone does to it on purpose; all from one seeded generator."""

from __future__ import annotations

from random import Random

NAMES = (
    b"../evil.py",
    b"/etc/passwd",
    b"sglang/../../evil.py",
    b"sglang//x.py",
    b"sglang/./x.py",
    b"sglang/x.py\r",
    b"sglang\\x.py",
    b"",
    b".git/hooks/x",
    b"sglang/x.py\x00",
    b"/dev/null",
    b"other/x.py",
    b'"sglang/\\056\\056/x"',
    b"sglang/x.py/y.py",
    b"sglang/" + 300 * b"n",
    "sglang/\u202etxt.py".encode(),
    b"sglang/\xff.py",
    b"c:/x.py",
    b"sglang/.ddtree-patch/lock",
    b"~/x.py",
    b'"sglang/x.py',
    b"sglang/\x1b[2Jx.py",
)
LINES = (
    b"-- \n",
    b"2.39.5\n",
    b"\\ No newline at end of file\n",
    b"@@ -1 +1 @@\n",
    b"@@ -0,0 +1 @@\n",
    b"+x\n",
    b"-x\n",
    b" x\n",
    b"\n",
    b"diff --git a/sglang/x.py b/sglang/x.py\n",
    b"new file mode 120000\n",
    b"old mode 100644\n",
    b"deleted file mode 100644\n",
    b"rename from a\n",
    b"GIT binary patch\n",
    b"Binary files a and b differ\n",
    b"--- a/../x\n",
    b"+++ b/../x\n",
    b"--- /dev/null\n",
    b"+++ /dev/null\n",
    b"@@ -1,0 +1,99999999999999 @@\n",
    b"@@ -%s +1 @@\n" % (b"9" * 5000),
    b"<html>\n",
    b"1,2c\n",
    b"*** 1 ****\n",
    b"index 1..2 160000\n",
)
NUMBERS = (b"0", b"1", b"2", b"3", b"7", b"99999999999999999999", b"-1", b"\xb2", b"1e3")


def damaged(rng: Random, text: bytes, more: tuple = ()) -> bytes:
    """TEXT after one to three accidents; `more`: further ones, functions (rng, text) -> text."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = rng.choice((_bytes, _bytes, _line, _line, _number, _name, _ends, _cut, *more))(rng, text)
    return text


def _bytes(rng: Random, text: bytes) -> bytes:
    at = rng.randrange(len(text) + 1)
    new = bytes(rng.choice(b"\n\r +-@\\\0\x1b\xff\xc2a9/\"'[]{}=") for _ in range(rng.randrange(4)))
    return text[:at] + new + text[at + rng.randrange(4) :]


def _line(rng: Random, text: bytes) -> bytes:
    lines = text.splitlines(keepends=True) or [b""]
    at = rng.randrange(len(lines))
    kind = rng.randrange(5)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, lines[at])
    elif kind == 2:
        lines.insert(at, rng.choice(LINES))
    elif kind == 3:
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    else:
        lines[at] = rng.choice((lines[at].lstrip(), lines[at].rstrip() + b"\n", b" " + lines[at], lines[at][1:]))
    return b"".join(lines)


def _number(rng: Random, text: bytes) -> bytes:
    """Another number in the place of one."""
    starts = [at for at in range(len(text)) if text[at : at + 1].isdigit()]
    if not starts:
        return text
    at = end = rng.choice(starts)
    while text[end : end + 1].isdigit():
        end += 1
    return text[:at] + rng.choice(NUMBERS) + text[end:]


def _name(rng: Random, text: bytes) -> bytes:
    names = [name for name in (b"sglang/x.py", b"sglang/y.py", b"sglang/new.py", b"sglang") if name in text]
    if not names:
        return text
    return text.replace(rng.choice(names), rng.choice(NAMES), rng.choice((1, 1, 2, -1)))


def _ends(rng: Random, text: bytes) -> bytes:
    kind = rng.randrange(4)
    if kind == 0:
        return text.replace(b"\n", b"\r\n")
    if kind == 1:
        return text.replace(b"\n", b"\r", rng.randrange(1, 4))
    return text.rstrip(b"\n") if kind == 2 else b"\xef\xbb\xbf" + text


def _cut(rng: Random, text: bytes) -> bytes:
    at = rng.randrange(len(text) + 1)
    return rng.choice((text[:at], text[at:], text[:at] + text))
