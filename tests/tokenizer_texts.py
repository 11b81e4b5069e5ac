"""Texts that tokenizers get wrong."""

from hypothesis import strategies as st

HARD_TEXTS = {
    "empty": "",
    "plain": "Hello world! Café déjà vu — 123 😊",
    "one space": " ",
    "only spaces": "     ",
    "leading space": " leading",
    "double spaces": "  two  and   three    four",
    "trailing spaces": "trailing  ",
    "tabs and newlines": "a\tb\t\tc\nd\n\ne\r\nf\n\n\n  g",
    "digits": "3333333",
    "number": "1,234.5678 and 007",
    "other numerals": "Ⅷ ½ ٣٤٥ ४५",
    "contractions": "don't WE'LL I'm he's they'd 'S 'tis",
    "code": "def f(x):\n    return x**2  # ok\n\n\tif (a && b) { c++; }",
    "cjk": "中文字符,日本語のテスト。",
    "thai": "ภาษาไทยไม่มีช่องว่าง",
    "hindi": "हिन्दी में परीक्षण",
    "korean": "한국어 시험입니다",
    "arabic": "اختبار اللغة العربية",
    "emoji with joiners": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪",
    "combining marks": "e\u0301 n\u0303 Z\u0351\u036b\u0343 한",
    "ligatures and width": "ﬁ Ａ１ ①",
    "zero width": "a\u200bb\ufeffc\u00add",
    "nul and controls": "a\x00b\x01\x7f\x85",
    "odd spaces": "a\u00a0b\u3000c\u2009d",
    "space symbol": "▁literal▁▁symbol",
    "chat markup": "<|im_start|>user\nhi<|im_end|>",
    "html": "<table><tr><td>x</td></tr></table>",
    "beyond the BMP": "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010ffff",
    "replacement character": "a\ufffdb",
    "camel case": "HTTPServer getURLFor XMLHttpRequest",
    "very long": "a" * 100_000,
}

any_text = st.text(max_size=60)
"""Any Unicode text without surrogates"""

plain_text = st.text(alphabet=st.sampled_from("ab c.,1é中😊\n▁"), max_size=40)
"""Text that meets the vocabularies of the tests often"""
