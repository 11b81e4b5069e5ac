"""`Words`: texts of a wanted number of tokens, whatever the tokenizer is.

Most tokenizers have one token for each common word with the space before it, so a text of n such words has n tokens.
Which words are such is asked of a tokenizer where there is one; else only the average is known, from the server's
own counts.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

_TEXT = """
    about above across act add after again air all almost along also always among and animal another answer any area
    around ask back ball base bed before began begin behind being below best better between big bird black blue board
    boat body book both bottom box boy bring brought build built business but buy call came can car care carry case
    cause cell center century change check child children city class clear close cold color come common complete
    contain cost could country course cover cross cry cut dark day decide deep did different direct do does dog done
    door down draw dream drive dry during each early earth east easy eat eight either end enough even ever every
    example eye face fact fall family far farm fast father feel feet few field figure fill final find fine fire first
    fish five fly follow food foot for force form found four free friend from front full game gave general get girl
    give glass go gold good got great green ground group grow had half hand happen hard has have he head hear heart
    heat heavy help her here high him his hold home horse hot hour house how hundred ice idea if in inch interest into
    is island it just keep kind king knew know land language large last late laugh law lay lead learn least leave left
    less let letter level life light like line list listen little live long look lot love low machine made main make
    man many map mark may me mean measure men might mile mind minute miss money month moon more morning most mother
    mountain move much music must my name near need never new next night no north not note nothing notice now number
    object ocean of off often oil old on once one only open or order other our out over own page paper part pass past
    pattern people perhaps person picture piece place plain plan plane plant play point port pose position possible
    power present press problem produce product pull put question quick quite rain ran reach read ready real reason
    record red remember rest result right river road rock room round rule run said same saw say school science sea
    second see seem self sentence serve set seven several shape she ship short should show side simple since sing sit
    six size sleep slow small snow so some song soon sound south space special spell stand star start state stay step
    still stood stop story street strong study such sun sure surface system table take talk teach tell ten test than
    that the their them then there these they thing think this those though thought thousand three through time to
    together told too took top toward town travel tree true try turn two under unit until up upon us use very voice
    vowel wait walk want war warm was watch water way we week weight well went were west what wheel when where which
    while white who whole why will wind with wonder wood word work world would write year yes yet you young your
"""
COMMON_WORDS = tuple(_TEXT.split())

Count = Callable[[str], Awaitable[int]]
"""Tokens of a text, without special ones"""


@dataclass(frozen=True)
class Words:
    """A vocabulary for random texts."""

    words: Sequence[str] = COMMON_WORDS
    tokens_per_word: float = 1.0
    origin: str = "assumed: one token per word"
    """Where `tokens_per_word` comes from, for the report"""

    def text(self, num_tokens: int, rng: random.Random) -> str:
        """A text of about so many tokens: exactly so many where each of the words is one."""
        return " ".join(rng.choices(self.words, k=max(1, round(num_tokens / self.tokens_per_word))))


async def words_of_tokenizer(count: Count, origin: str) -> Words:
    """The common words that are one token each for a tokenizer; all of them, and their average, if hardly any is."""
    single = await _single_tokens(COMMON_WORDS, count)
    if len(single) >= 100:
        return Words(single, 1.0, origin)
    total = await count(" ".join(COMMON_WORDS))
    return Words(COMMON_WORDS, max(total, 1) / len(COMMON_WORDS), origin)


async def _single_tokens(words: Sequence[str], count: Count) -> list[str]:
    """Halves a list until a text of its words has as many tokens as words. The word before makes the first one stand
    behind a space, as it will in a text."""
    lead = "the "
    if await count(lead + " ".join(words)) == len(words) + await count(lead.strip()):
        return list(words)
    if len(words) == 1:
        return []
    middle = len(words) // 2
    return await _single_tokens(words[:middle], count) + await _single_tokens(words[middle:], count)


_PROBE_WORDS = (16, 272)


async def words_of_usage(prompt_tokens: Callable[[str], Awaitable[int | None]]) -> Words:
    """The average of a server that only counts the tokens of whole prompts: two prompts that differ by 256 words.

    Args:
        prompt_tokens: text of a prompt → `usage.prompt_tokens`, with what the server's chat template adds; None where
            the server does not say.
    """
    counts = [
        await prompt_tokens(" ".join(random.Random(number).choices(COMMON_WORDS, k=number))) for number in _PROBE_WORDS
    ]
    few, many = counts
    if few is None or many is None or many <= few:
        return Words()
    return Words(COMMON_WORDS, (many - few) / (_PROBE_WORDS[1] - _PROBE_WORDS[0]), "calibrated by the server's usage")
