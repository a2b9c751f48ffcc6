"""Remove likely secrets from a command line before it is stored in a report."""

from __future__ import annotations

import re
from collections.abc import Sequence

REDACTED = "***"

_SECRET_WORDS = {
    *(
        "token",
        "key",
        "keys",
        "apikey",
        "secret",
        "secrets",
        "password",
        "passwd",
        "pwd",
        "passphrase",
    ),
    *("credential", "credentials", "auth"),
}
"""Parts of the names of flags and variables whose values are secret."""

_NOT_SECRET = {"max", "min", "num", "n", "new", "pad", "eos", "bos", "unk", "per", "count"}
"""Next to `token`, these say that a flag is about tokens of text: --eos-token, --max-token."""

_ASSIGNMENT = re.compile(r"(?P<name>-{0,2}[A-Za-z_][\w.-]*)(?P<sign>[=:])(?P<value>.+)", re.DOTALL)

_EMBEDDED = re.compile(
    r"(?P<name>-{0,2}[A-Za-z_][\w-]*)(?P<sign>[\"']?\s*[=:]\s*|\s+)(?P<value>[\"']?[^\s\"';,)]+)"
)
"""A name and its value within a longer text, such as the script of `bash -c`."""

_KNOWN_TOKENS = re.compile(
    r"\b(?:hf_|api_org_|sk-|ghp_|gho_|ghs_|github_pat_|glpat-|xox[abprs]-|AKIA|ASIA|AIza)"
    r"[A-Za-z0-9_\-]{8,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # JSON web tokens
)

_URL_PASSWORD = re.compile(r"(?P<start>[a-z][a-z0-9+.-]*://[^/\s:@]*:)[^/\s@]+(?=@)", re.IGNORECASE)

_BEARER = re.compile(r"(?P<start>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)


def redact(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with `***` instead of likely secrets.

    Values of flags and variables that are named like a secret are removed, and words that look
    like the access tokens of well-known services. A secret without such a sign stays.
    """
    redacted = []
    is_value = False
    for word in command:
        if is_value and not (word.startswith("--") and len(word) > 2):
            redacted.append(REDACTED)
            is_value = False
            continue
        is_value = word.startswith("-") and "=" not in word and _is_secret(word)
        redacted.append(_redact_word(word))
    return tuple(redacted)


def _redact_word(word: str) -> str:
    match = _ASSIGNMENT.fullmatch(word)
    if match and _is_secret(match["name"]):
        return f"{match['name']}{match['sign']}{REDACTED}"
    if any(map(str.isspace, word)):
        word = _EMBEDDED.sub(_redact_embedded, word)
    word = _KNOWN_TOKENS.sub(REDACTED, word)
    for pattern in (_URL_PASSWORD, _BEARER):
        word = pattern.sub(rf"\g<start>{REDACTED}", word)
    return word


def _redact_embedded(match: re.Match[str]) -> str:
    is_given = not match["sign"].isspace() or match["name"].startswith("-")
    secret = is_given and _is_secret(match["name"])
    return f"{match['name']}{match['sign']}{REDACTED}" if secret else match[0]


def _is_secret(name: str) -> bool:
    """Return whether a flag or variable is named like a secret, such as --hf-token or HF_TOKEN."""
    # Split camel case, too: --apiKey.
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    parts = [part for part in re.split(r"[^A-Za-z0-9]+", spaced.lower()) if part]
    return bool(_SECRET_WORDS.intersection(parts)) and not _NOT_SECRET.intersection(parts)
