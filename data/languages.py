"""Codes of languages, and the tokenizer with which sacrebleu computes BLEU of each.

sacrebleu chooses by the codes zh, ja and ko alone. Folders have others for the same languages: zh_CN, zho, zh-Hans,
cmn, ja_XX, jpn_Jpan, kor. A code is a language, perhaps with a script and a country (BCP 47), in two or three letters.
"""

import re
from dataclasses import dataclass

from errors import InputError

__all__ = ["TOKENIZERS", "Scoring", "base_language", "scoring"]

# Those of sacrebleu.
TOKENIZERS = ("13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none", "spm", "flores101", "flores200")
OF_LANGUAGE = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}  # all others: 13a
NAMES = {"zh": "Chinese", "ja": "Japanese", "ko": "Korean"}

# ISO 639-1, with the codes of three letters (639-2, both of them where there are two) of the same languages.
CODES = """\
aa aar|ab abk|ae ave|af afr|ak aka|am amh|an arg|ar ara arb|as asm|av ava|ay aym|az aze azj|ba bak|
be bel|bg bul|bh bih|bi bis|bm bam|bn ben|bo bod tib|br bre|bs bos|ca cat|ce che|ch cha|co cos|cr cre|
cs ces cze|cu chu|cv chv|cy cym wel|da dan|de deu ger|dv div|dz dzo|ee ewe|el ell gre|en eng|eo epo|
es spa|et est ekk|eu eus baq|fa fas per pes|ff ful|fi fin|fj fij|fo fao|fr fra fre|fy fry|ga gle|gd gla|
gl glg|gn grn|gu guj|gv glv|ha hau|he heb|hi hin|ho hmo|hr hrv|ht hat|hu hun|hy hye arm|hz her|ia ina|
id ind|ie ile|ig ibo|ii iii|ik ipk|io ido|is isl ice|it ita|iu iku|ja jpn|jv jav|ka kat geo|kg kon|
ki kik|kj kua|kk kaz|kl kal|km khm|kn kan|ko kor|kr kau|ks kas|ku kur|kv kom|kw cor|ky kir|la lat|
lb ltz|lg lug|li lim|ln lin|lo lao|lt lit|lu lub|lv lav lvs|mg mlg|mh mah|mi mri mao|mk mkd mac|ml mal|
mn mon khk|mr mar|ms msa may zsm|mt mlt|my mya bur|na nau|nb nob|nd nde|ne nep npi|ng ndo|nl nld dut|
nn nno|no nor|nr nbl|nv nav|ny nya|oc oci|oj oji|om orm|or ori ory|os oss|pa pan|pi pli|pl pol|
ps pus pbt|pt por|qu que|rm roh|rn run|ro ron rum|ru rus|rw kin|sa san|sc srd|sd snd|se sme|sg sag|
sh hbs|si sin|sk slk slo|sl slv|sm smo|sn sna|so som|sq sqi alb als|sr srp|ss ssw|st sot|su sun|sv swe|
sw swa swh|ta tam|te tel|tg tgk|th tha|ti tir|tk tuk|tl tgl fil|tn tsn|to ton|tr tur|ts tso|tt tat|
tw twi|ty tah|ug uig|uk ukr|ur urd|uz uzb uzn|ve ven|vi vie|vo vol|wa wln|wo wol|xh xho|yi yid ydd|
yo yor|za zha|zh zho chi cmn yue wuu hak nan gan hsn lzh cdo cjy czh mnp|zu zul"""
# Languages whose words have no spaces between, beside Chinese and Japanese.
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
TOY = "v"  # the target of data.wmt.SyntheticPairs
# Not codes of these languages (kr is that of Kanuri), and yet many corpora have them.
MISTAKEN = {"cn": "zh", "jp": "ja", "kr": "ko"}


def _read_codes() -> dict[str, str]:
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
    """Returns the language of a code in two letters, where there are any: zh for zh_CN, zho, cmn-Hans or zh-TW."""
    language = re.split(r"[-_.@]", code.strip().lower())[0]
    return BASES.get(language, language)


def scoring(code: str, tokenizer: str = "") -> Scoring:
    """Returns how BLEU of a target language is computed: with `tokenizer`, or with the one of the language.

    Raises InputError: a tokenizer that sacrebleu does not have; a code that many take for another language's.
    """
    language = base_language(code)
    if tokenizer:
        if tokenizer not in TOKENIZERS:
            raise InputError(f"--bleu-tokenizer is {tokenizer}; expected one of {', '.join(TOKENIZERS)}")
        return Scoring(tokenizer, language)
    if language in MISTAKEN:
        meant = MISTAKEN[language]
        raise InputError(
            f"the target language is {code}, which is no code of {NAMES[meant]} ({meant} is): give --bleu-tokenizer "
            f"{OF_LANGUAGE[meant]} for {NAMES[meant]}, or 13a for a language with spaces between words"
        )
    _, *rest = re.split(r"[-_.@]", code.strip().lower())
    if language in OF_LANGUAGE and "latn" not in rest:
        return Scoring(OF_LANGUAGE[language], language)
    script = next((f"{language}-{part}" for part in rest if f"{language}-{part}" in SPACELESS), language)
    if script in SPACELESS and "latn" not in rest:
        return Scoring(
            "13a",
            language,
            f"warning: the target language {code} ({SPACELESS[script]}) is written without spaces, and BLEU's "
            "tokenizer 13a takes what stands between spaces for a word: give --bleu-tokenizer flores200 (which is "
            "downloaded) or char",
        )
    note = ""
    if language not in BASES.values() and language != TOY:
        note = f"the target language {code} is no code that is known here: BLEU takes the tokenizer 13a, for languages "
        note += "with spaces between words; --bleu-tokenizer takes another"
    return Scoring("13a", language, note)
