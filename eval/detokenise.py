"""WikiText as ordinary text: what lm-evaluation-harness's task `wikitext` feeds a model.

WikiText is stored with spaces around punctuation and `@-@` for hyphens inside words. The rules, and
their order, are those of that task (version 2), so that perplexities can be compared.
"""

import re

# Plain replacements before and after the spaces inside brackets and quotes are taken out.
BEFORE = [("s '", "s'"), (" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", ".")]
BEFORE += [(f" {mark} ", f"{mark} ") for mark in ":;.!?,"]
PAIRS = [("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'")]
AFTER = [("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°")]
AFTER += [(" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")]


def detokenise_wikitext(text: str) -> str:
    """The text with its punctuation set as people write it."""
    for stored, written in BEFORE:
        text = text.replace(stored, written)
    for left, right in PAIRS:
        inside = rf"{re.escape(left)}\s*([^{re.escape(right)}]*?)\s*{re.escape(right)}"
        text = re.sub(inside, lambda match, a=left, b=right: a + match[1] + b, text)
    for stored, written in AFTER:
        text = text.replace(stored, written)
    return text
