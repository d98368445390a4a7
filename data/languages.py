"""Codes of languages, and the tokenizer with which sacrebleu computes BLEU of each.

sacrebleu chooses by the codes zh, ja and ko alone. Folders have others for the same languages:
zh_CN, zho, zh-Hans, cmn, ja_XX, jpn_Jpan, kor. A code is a language in two or three letters,
perhaps with a script and a country (BCP 47).
"""

import re
from dataclasses import dataclass

from errors import InputError

__all__ = ["TOKENIZERS", "Scoring", "base_language", "scoring"]

# Those of sacrebleu.
TOKENIZERS = (
    "13a",
    "intl",
    "zh",
    "ja-mecab",
    "ko-mecab",
    "char",
    "none",
    "spm",
    "flores101",
    "flores200",
)
DEFAULT = "13a"
TOKENIZER_OF_LANGUAGE = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}  # all others: DEFAULT
NAMES = {"zh": "Chinese", "ja": "Japanese", "ko": "Korean"}

# A group is a language: its code of ISO 639-1, then those of three letters (639-2, both of them
# where there are two; and 639-3 of its variants).
CODES = """\
aa aar|ab abk|ae ave|af afr|ak aka|am amh|an arg|ar ara arb|as asm|av ava|ay aym|az aze azj|
ba bak|be bel|bg bul|bh bih|bi bis|bm bam|bn ben|bo bod tib|br bre|bs bos|ca cat|ce che|ch cha|
co cos|cr cre|cs ces cze|cu chu|cv chv|cy cym wel|da dan|de deu ger|dv div|dz dzo|ee ewe|
el ell gre|en eng|eo epo|es spa|et est ekk|eu eus baq|fa fas per pes|ff ful|fi fin|fj fij|fo fao|
fr fra fre|fy fry|ga gle|gd gla|gl glg|gn grn|gu guj|gv glv|ha hau|he heb|hi hin|ho hmo|hr hrv|
ht hat|hu hun|hy hye arm|hz her|ia ina|id ind|ie ile|ig ibo|ii iii|ik ipk|io ido|is isl ice|
it ita|iu iku|ja jpn|jv jav|ka kat geo|kg kon|ki kik|kj kua|kk kaz|kl kal|km khm|kn kan|ko kor|
kr kau|ks kas|ku kur|kv kom|kw cor|ky kir|la lat|lb ltz|lg lug|li lim|ln lin|lo lao|lt lit|lu lub|
lv lav lvs|mg mlg|mh mah|mi mri mao|mk mkd mac|ml mal|mn mon khk|mr mar|ms msa may zsm|mt mlt|
my mya bur|na nau|nb nob|nd nde|ne nep npi|ng ndo|nl nld dut|nn nno|no nor|nr nbl|nv nav|ny nya|
oc oci|oj oji|om orm|or ori ory|os oss|pa pan|pi pli|pl pol|ps pus pbt|pt por|qu que|rm roh|
rn run|ro ron rum|ru rus|rw kin|sa san|sc srd|sd snd|se sme|sg sag|sh hbs|si sin|sk slk slo|
sl slv|sm smo|sn sna|so som|sq sqi alb als|sr srp|ss ssw|st sot|su sun|sv swe|sw swa swh|ta tam|
te tel|tg tgk|th tha|ti tir|tk tuk|tl tgl fil|tn tsn|to ton|tr tur|ts tso|tt tat|tw twi|ty tah|
ug uig|uk ukr|ur urd|uz uzb uzn|ve ven|vi vie|vo vol|wa wln|wo wol|xh xho|yi yid ydd|yo yor|
za zha|zh zho chi cmn yue wuu hak nan gan hsn lzh cdo cjy czh mnp|zu zul"""

# Languages whose words have no spaces between, beside Chinese and Japanese; where only one of their
# scripts has none, with that script.
SPACELESS = {
    "th": "Thai",
    "my": "Burmese",
    "km": "Khmer",
    "lo": "Lao",
    "bo": "Tibetan",
    "dz": "Dzongkha",
    "shn": "Shan",
    "nod": "Northern Thai",
    "jv-java": "Javanese in its own script",
    "ban-bali": "Balinese in its own script",
}

TOY = "v"  # the target language of data.wmt.SyntheticPairs

# Not codes of these languages (kr is that of Kanuri), and yet many corpora have them.
MISTAKEN = {"cn": "zh", "jp": "ja", "kr": "ko"}


def _read_codes() -> dict[str, str]:
    """Returns the first code of its group for each code."""
    codes = {}
    for group in CODES.replace("\n", "").split("|"):
        first, *others = group.split()
        for code in (first, *others):
            codes[code] = first
    return codes


BASES = _read_codes()


@dataclass(frozen=True)
class Scoring:
    """How BLEU of a language is computed."""

    tokenizer: str  # sacrebleu's name
    language: str  # the code as sacrebleu knows it, such as zh for zh_CN
    note: str = ""  # what the user should know of it, in a sentence


def base_language(code: str) -> str:
    """Returns a language in two letters, where it has any: zh for zh_CN, zho, cmn-Hans or zh-TW."""
    language, *_ = _subtags(code)
    return BASES.get(language, language)


def _subtags(code: str) -> list[str]:
    """Returns a code's language, script and country, in lower case; ["zh", "hans"] of zh-Hans."""
    return re.split(r"[-_.@]", code.strip().lower())


def scoring(code: str, tokenizer: str = "") -> Scoring:
    """Returns how BLEU of a target language is computed.

    Args:
        code: of the language, in any form that a folder may have.
        tokenizer: sacrebleu's name of the one to take; by default the language's.
    Raises:
        InputError: a tokenizer that sacrebleu does not have; a code that many take for another
            language's.
    """
    language = base_language(code)
    if tokenizer:
        if tokenizer not in TOKENIZERS:
            raise InputError(
                f"--bleu-tokenizer is {tokenizer}; expected one of {', '.join(TOKENIZERS)}"
            )
        return Scoring(tokenizer, language)

    if language in MISTAKEN:
        meant = MISTAKEN[language]
        name = NAMES[meant]
        raise InputError(
            f"the target language is {code}, which is no code of {name} ({meant} is): give "
            f"--bleu-tokenizer {TOKENIZER_OF_LANGUAGE[meant]} for {name}, or 13a for a language "
            "with spaces between words"
        )

    _, *subtags = _subtags(code)
    is_latin = "latn" in subtags
    if language in TOKENIZER_OF_LANGUAGE and not is_latin:
        return Scoring(TOKENIZER_OF_LANGUAGE[language], language)
    spaceless = _spaceless_name(language, subtags)
    if spaceless and not is_latin:
        note = (
            f"warning: the target language {code} ({spaceless}) is written without spaces, and "
            "BLEU's tokenizer 13a takes what stands between spaces for a word: give "
            "--bleu-tokenizer flores200 (which is downloaded) or char"
        )
        return Scoring(DEFAULT, language, note)
    if language not in BASES.values() and language != TOY:
        note = (
            f"the target language {code} is no code that is known here: BLEU takes the tokenizer "
            "13a, for languages with spaces between words; --bleu-tokenizer takes another"
        )
        return Scoring(DEFAULT, language, note)
    return Scoring(DEFAULT, language)


def _spaceless_name(language: str, subtags: list[str]) -> str:
    """Returns the name of a language, or of it in one of its scripts, that has no spaces; or ""."""
    for subtag in subtags:
        in_script = f"{language}-{subtag}"
        if in_script in SPACELESS:
            return SPACELESS[in_script]
    return SPACELESS.get(language, "")
