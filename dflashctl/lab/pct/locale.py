"""The caller's environment and locale. pct decodes its arguments as the locale says, so the locale decides
what reaches the container (docs/pct.md#locale)."""

from __future__ import annotations

import _locale
import codecs
import os

_PLAIN = {b"": "ascii", b"C": "ascii", b"POSIX": "ascii", b"C.UTF-8": "utf-8", b"C.utf8": "utf-8"}


def environment() -> dict[bytes, bytes]:
    """The environment exactly as the caller gave it. Python changes LC_CTYPE at its start when the locale is
    C, and that must not leak into a container, so the kernel's own record is read."""
    with open("/proc/self/environ", "rb") as file:
        entries = file.read().split(b"\0")
    result: dict[bytes, bytes] = {}
    for entry in entries:
        name, equals, value = entry.partition(b"=")
        if equals and name not in result:
            result[name] = value
    return result


def codec(env: dict[bytes, bytes]) -> tuple[str, str]:
    """(Python's name of the character set that arguments are decoded with, Perl's warning or "").

    No locale, C and POSIX mean ASCII: every byte above 127 becomes U+FFFD. A locale that this machine does
    not have does the same, with a warning on stderr at every call.
    """
    settings = {name: value for name, value in env.items() if name == b"LANG" or name.startswith(b"LC_")}
    chosen = settings.get(b"LC_ALL") or settings.get(b"LC_CTYPE") or settings.get(b"LANG") or b""
    if all(value in _PLAIN for value in settings.values()):
        return _PLAIN[chosen], ""
    for variable in [name for name in os.environb if name.startswith(b"LC_") and name not in settings]:
        del os.environb[variable]
    os.environb.update(settings)
    # Perl tries the environment, then LC_ALL and LANG by themselves, then C.
    trials = [
        "",
        *(value.decode("latin-1") for value in (env.get(b"LC_ALL"), env.get(b"LANG")) if value),
        "C",
    ]
    chosen_locale = next(trial for trial in trials if _set(trial))
    warning = _warning(env, settings, chosen_locale) if chosen_locale else ""
    charset = _locale.nl_langinfo(_locale.CODESET)
    try:
        return codecs.lookup(charset).name, warning
    except LookupError:
        return "ascii", warning


def _set(name: str) -> bool:
    try:
        _locale.setlocale(_locale.LC_ALL, name)
    except _locale.Error:  # type: ignore[attr-defined]
        return False
    return True


def _warning(env: dict[bytes, bytes], settings: dict[bytes, bytes], fallback: str) -> str:
    def line(name: bytes, value: bytes | None) -> str:
        shown = "(unset)" if value is None else f'"{value.decode("latin-1")}"'
        return f"\t{name.decode('latin-1')} = {shown}"

    listed = [line(b"LANGUAGE", env.get(b"LANGUAGE")), line(b"LC_ALL", env.get(b"LC_ALL"))]
    listed += [line(name, settings[name]) for name in settings if name not in (b"LC_ALL", b"LANG")]
    listed.append(line(b"LANG", env.get(b"LANG")))
    kind = "the standard locale" if fallback == "C" else "a fallback locale"
    return (
        "perl: warning: Setting locale failed.\nperl: warning: Please check that your locale settings:\n"
        + ",\n".join(listed)
        + "\n    are supported and installed on your system.\n"
        f'perl: warning: Falling back to {kind} ("{fallback}").\n'
    )
